/** Puts text on the clipboard. Over plain HTTP from another machine browsers offer the old way alone. */

/** `html`: the same for where pasted text may have a form, such as tables. */
export async function copyText(text: string, html?: string): Promise<void> {
  if (html !== undefined && navigator.clipboard !== undefined && "ClipboardItem" in globalThis) {
    const forms = { "text/plain": blob(text, "text/plain"), "text/html": blob(html, "text/html") };
    return navigator.clipboard.write([new ClipboardItem(forms)]);
  }
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

/** What was rendered, without what only the page can use. */
export function htmlOf(rendered: Iterable<Element>): string {
  return [...rendered]
    .map((node) => {
      const copy = node.cloneNode(true) as Element;
      for (const each of copy.querySelectorAll("button, figcaption, .cite")) each.remove();
      for (const each of copy.querySelectorAll("figure")) each.replaceWith(...each.childNodes);
      for (const each of copy.querySelectorAll("[class], [tabindex]")) {
        each.removeAttribute("class");
        each.removeAttribute("tabindex");
      }
      return copy.innerHTML;
    })
    .join("\n");
}

const blob = (text: string, type: string): Blob => new Blob([text], { type });
