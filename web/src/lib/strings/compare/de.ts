import type { CompareStrings } from "./en";

/** What is said where answers are compared, in German. */
export const de: CompareStrings = {
  ask: "Die nächste Frage mehreren stellen",
  about:
    "Jede Antwort entsteht für sich, nebeneinander. Du wählst die, mit der es weitergeht; die anderen bleiben als Fassungen.",
  answer: (n) => `Antwort ${n}`,
  answerOf: (n, name) => `Antwort ${n}: ${name}`,
  model: "Modell",
  strategy: "Strategie",
  none: "Keine",
  more: "Noch eine",
  fewer: (n) => `Ohne Antwort ${n}`,
  answers: "Antworten, nebeneinander",
  name: (model, strategy) => (strategy === null ? model : `${model}, ${strategy}`),
  unnamed: "Antwort",
  stop: (name) => `${name} anhalten`,
  choose: "Mit dieser weiter",
  chooseOf: (name) => `Mit dieser weiter: ${name}`,
  refused: "Es wurde nicht gefragt.",
};
