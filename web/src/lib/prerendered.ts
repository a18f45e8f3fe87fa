/** The first screen as index.html has it: what it says of the model, until the server is heard. */
const found = document.querySelector(".prerendered");

export const prerendered = {
  about: found?.querySelector(".about")?.textContent ?? "",
  /** Makes room for the page. */
  remove: (): void => found?.remove(),
};
