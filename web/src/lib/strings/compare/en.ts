/** What is said where answers are compared, in English. */
export const en = {
  ask: "Ask the next question of several",
  about: "Each writes an answer of its own, side by side. You choose the one to go on with; the others stay as versions.",
  answer: (n: number) => `Answer ${n}`,
  answerOf: (n: number, name: string) => `Answer ${n}: ${name}`,
  model: "Model",
  strategy: "Strategy",
  none: "None",
  more: "One more",
  fewer: (n: number) => `Without answer ${n}`,
  answers: "Answers, side by side",
  name: (model: string, strategy: string | null) => (strategy === null ? model : `${model}, ${strategy}`),
  unnamed: "Answer",
  stop: (name: string) => `Stop ${name}`,
  choose: "Go on with this one",
  chooseOf: (name: string) => `Go on with this one: ${name}`,
  refused: "It was not asked.",
};
export type CompareStrings = typeof en;
