/** Whether guessed tokens are shown as such, which this browser keeps. */
const KEY = "ponder.guesses";

class Guesses {
  shown = $state(false);

  constructor() {
    try {
      this.shown = localStorage.getItem(KEY) === "shown";
    } catch {
      // Storage may be forbidden; the choice then holds until the page is left.
    }
  }

  show(shown: boolean): void {
    this.shown = shown;
    try {
      if (shown) localStorage.setItem(KEY, "shown");
      else localStorage.removeItem(KEY);
    } catch {
      // As above.
    }
  }
}

export const guesses = new Guesses();
