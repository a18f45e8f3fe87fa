/** The one door through which model text becomes HTML. */
import DOMPurify from "dompurify";

export function sanitise(html: string): string {
  return DOMPurify.sanitize(html, {
    ADD_ATTR: ["target"],
    FORBID_ATTR: ["style"],
    FORBID_TAGS: ["style", "form", "img", "svg", "math"],
  });
}
