/**
 * Which way a text is read, by its first letter. For fields that a long text is pasted into: there `dir="auto"` costs
 * the browser seconds.
 */
const RIGHT_TO_LEFT = /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}\p{Script=Adlam}]/u;

export function directionOf(text: string): "ltr" | "rtl" | "auto" {
  const letter = /\p{L}/u.exec(text)?.[0];
  if (letter === undefined) return "auto";
  return RIGHT_TO_LEFT.test(letter) ? "rtl" : "ltr";
}
