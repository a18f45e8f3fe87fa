/** Puts text on the clipboard. Over plain HTTP from another machine browsers offer the old way alone. */
export async function copyText(text: string): Promise<void> {
  if (navigator.clipboard !== undefined) return navigator.clipboard.writeText(text);
  const focused = document.activeElement;
  const box = document.createElement("textarea");
  box.value = text;
  box.className = "heard";
  document.body.append(box);
  box.select();
  document.execCommand("copy");
  box.remove();
  if (focused instanceof HTMLElement) focused.focus({ preventScroll: true });
}
