import type { SessionStrings } from "./en";

/** What is said where one signs in, in German. */
export const de: SessionStrings = {
  signIn: "Anmelden",
  about: "Dieser Server fragt nach einem API-Schlüssel. Wer ihn betreibt, macht einen mit",
  again: "Deine Sitzung ist zu Ende. Melde dich an und mach weiter, wo du warst.",
  apiKey: "API-Schlüssel",
  showKey: "Den Schlüssel zeigen",
  refused: "Dieser Schlüssel gilt nicht. Vielleicht ist er vertippt, abgelaufen oder widerrufen.",
  missing: "Füge zuerst einen Schlüssel ein.",
  tooOften: (s: number) => `Es waren zu viele falsche Schlüssel. Versuch es in ${s} s noch einmal.`,
  noCookie: "Der Schlüssel gilt, aber der Browser behält kein Cookie für diese Seite. Erlaube es und versuch es noch einmal.",
};
