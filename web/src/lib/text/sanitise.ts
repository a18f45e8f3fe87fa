/** The one door through which model text becomes HTML. */
import DOMPurify, { type DOMPurify as Purifier } from "dompurify";

let purifier: Purifier | null = null;

/** One that reads what is allowed once, not for each text. */
function configured(): Purifier {
  const made = DOMPurify(window);
  made.setConfig({
    ADD_ATTR: ["target"],
    FORBID_ATTR: ["style"],
    FORBID_TAGS: ["style", "form", "img", "svg", "math"],
  });
  return made;
}

export function sanitise(html: string): string {
  purifier ??= configured();
  return purifier.sanitize(html);
}
