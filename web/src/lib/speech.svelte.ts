/** The browser's own speech: answers read aloud, and messages dictated. This server never gets any sound. */
import { strings } from "./strings";

const SENTENCE = /[^.!?。！？\n]+[.!?。！？\n]*/g; // a browser may fall silent in the middle of a longer text

class Voice {
  reading = $state.raw<unknown>(null); // what is read: whatever names it
  readonly speaks = "speechSynthesis" in globalThis;

  /** Read a text, instead of what is being read. */
  read(what: unknown, text: string): void {
    this.stop();
    const parts = text.match(SENTENCE)?.filter((part) => part.trim() !== "") ?? [];
    parts.forEach((part, i) => {
      const spoken = new SpeechSynthesisUtterance(part.trim());
      const over = (): void => {
        if (this.reading === what && i === parts.length - 1) this.reading = null;
      };
      spoken.onend = over;
      spoken.onerror = over;
      speechSynthesis.speak(spoken);
    });
    this.reading = parts.length > 0 ? what : null;
  }

  stop(): void {
    if (this.reading === null) return;
    this.reading = null;
    speechSynthesis.cancel();
  }
}

export const voice = new Voice();

interface Recognition extends EventTarget {
  lang: string;
  continuous: boolean;
  start(): void;
  stop(): void;
}

interface Recognised extends Event {
  readonly resultIndex: number;
  readonly results: ArrayLike<ArrayLike<{ transcript: string }> & { isFinal: boolean }>;
}

type Recogniser = new () => Recognition;
const { SpeechRecognition, webkitSpeechRecognition } = globalThis as {
  SpeechRecognition?: Recogniser;
  webkitSpeechRecognition?: Recogniser;
};
const Recogniser = SpeechRecognition ?? webkitSpeechRecognition;

/** Hears words until it is stopped or nobody speaks. */
export class Dictation {
  on = $state(false);
  readonly hears = Recogniser !== undefined;
  #recognition: Recognition | null = null;

  /** `heard` takes words that are sure; `failed` hears why there are none. */
  constructor(
    private readonly heard: (words: string) => void,
    private readonly failed: (why: string) => void,
  ) {}

  toggle(): void {
    if (this.on) this.#recognition?.stop();
    else this.#start();
  }

  #start(): void {
    if (Recogniser === undefined) return;
    const recognition = (this.#recognition = new Recogniser());
    recognition.lang = document.documentElement.lang || navigator.language;
    recognition.continuous = true;
    recognition.addEventListener("result", (event) => {
      const { results, resultIndex } = event as Recognised;
      for (const result of Array.from(results).slice(resultIndex)) {
        if (result.isFinal) this.heard(result[0]?.transcript.trim() ?? "");
      }
    });
    recognition.addEventListener("error", (event) => {
      const { error } = event as Event & { error?: string };
      if (error !== "aborted" && error !== "no-speech") this.failed(strings.speech.failed(error ?? ""));
    });
    recognition.addEventListener("end", () => (this.on = false));
    recognition.start();
    this.on = true;
  }
}
