import type { DiffusionStrings } from "./en";

/** What is said of masked diffusion, in German. */
const decimal = new Intl.NumberFormat("de", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const percent = new Intl.NumberFormat("de", { style: "percent", maximumFractionDigits: 0 });
const passes = (n: number): string => (n === 1 ? "1 Durchgang" : `${n} Durchgängen`);

export const de: DiffusionStrings = {
  title: "Maskierte Diffusion",
  about: (model: string) =>
    `${model} füllt die Lücken eines Textes in beliebiger Reihenfolge, mehrere Stellen je Durchgang. Ein Experiment.`,
  notHere: "Dieser Server hat kein Modell für maskierte Diffusion. Sein Betreiber kann mit --diffusion-model eines hinzufügen.",
  text: "Text",
  hint: (mask: string, tokens: number) => `Schreibe ${mask} für jede Stelle, die zu füllen ist, oder eine Frage ohne Lücke. Bis zu ${tokens} Tokens.`,
  example: (mask: string) => `monday tues${mask.repeat(6)}dnesday`,
  way: "Gefüllt je Durchgang",
  steps: "So viele Stellen",
  stepsOf: "Stellen je Durchgang",
  threshold: "Alle, die wahrscheinlich genug sind",
  thresholdOf: "Kleinste Wahrscheinlichkeit",
  block: "Stellen eines Blocks",
  temperature: "Temperatur",
  seed: "Startwert",
  fill: "Füllen",
  stop: "Anhalten",
  filling: "Wird gefüllt…",
  notDone: (why: string) => `Das ging nicht. ${why}`,
  ended: {
    stop: "",
    length: "Die Antwort hat so viele Tokens, wie sie haben darf.",
    deadline: "Die Zeit dafür war um.",
  },
  done: (n: number, text: string) => `In ${passes(n)} gefüllt: ${text}`,
  shown: (masked: number, text: string) => (masked === 0 ? text : `${masked === 1 ? "1 maskierte Stelle" : `${masked} maskierte Stellen`}: ${text}`),
  filled: (token: string, sure: number, pass: number) => `${token}: ${percent.format(sure)}, Durchgang ${pass}`,
  unsure: "unsicher",
  sure: "sicher",
  pass: "Durchgang",
  at: (at: number, of: number) => `${at} von ${passes(of)}`,
  perPass: (n: number) => `${decimal.format(n)} Tokens je Durchgang`,
  play: "Abspielen",
  pause: "Pause",
};
