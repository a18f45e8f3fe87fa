/** Focus what takes the place of buttons that were pressed, until what is returned is called.
 *
 * The second press of a double click finds the buttons gone, and would take the focus wherever it lands. */
export function focusInPlace(box: HTMLElement): () => void {
  box.focus({ preventScroll: true });
  const keep = (event: MouseEvent): void => {
    if (event.detail > 1 && document.activeElement === box) event.preventDefault();
  };
  window.addEventListener("mousedown", keep);
  return () => window.removeEventListener("mousedown", keep);
}
