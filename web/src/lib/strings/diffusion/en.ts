/** What is said of masked diffusion, in English. */
const decimal = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 0 });
const passes = (n: number): string => (n === 1 ? "1 pass" : `${n} passes`);

export const en = {
  title: "Masked diffusion",
  about: (model: string) =>
    `${model} fills the gaps of a text in any order, several places a pass. An experiment.`,
  notHere: "This server has no masked-diffusion model. Its operator can add one with --diffusion-model.",
  text: "Text",
  hint: (mask: string, tokens: number) => `Write ${mask} for each place to fill, or a question without one. Up to ${tokens} tokens.`,
  example: (mask: string) => `monday tues${mask.repeat(6)}dnesday`,
  way: "Filled in a pass",
  steps: "So many places",
  stepsOf: "Places a pass",
  threshold: "All that are likely enough",
  thresholdOf: "Least probability",
  block: "Places of a block",
  temperature: "Temperature",
  seed: "Seed",
  fill: "Fill",
  stop: "Stop",
  filling: "Filling…",
  notDone: (why: string) => `That did not work. ${why}`,
  ended: {
    stop: "",
    length: "The answer has as many tokens as it may.",
    deadline: "The time for it was over.",
  },
  done: (n: number, text: string) => `Filled in ${passes(n)}: ${text}`,
  shown: (masked: number, text: string) => (masked === 0 ? text : `${masked === 1 ? "1 masked place" : `${masked} masked places`}: ${text}`),
  filled: (token: string, sure: number, pass: number) => `${token}: ${percent.format(sure)}, pass ${pass}`,
  unsure: "unsure",
  sure: "sure",
  pass: "Pass",
  at: (at: number, of: number) => `${at} of ${passes(of)}`,
  perPass: (n: number) => `${decimal.format(n)} tokens a pass`,
  play: "Play",
  pause: "Pause",
};

export type DiffusionStrings = typeof en;
