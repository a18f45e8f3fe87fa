/**
 * Answers read aloud, and messages dictated: by the browser where it can, and else by the audio server of this one, if
 * there is one. Without it this server never gets any sound.
 */
import { spoken, transcribed, type AudioServer } from "./api";
import { failureOf } from "./reply.svelte";
import { strings } from "./strings";

const SENTENCE = /[^.!?。！？\n]+[.!?。！？\n]*/g; // a browser may fall silent in the middle of a longer text
const MAX_SPOKEN = 4096; // characters: as many as OpenAI's servers take

/** The parts of a text that are spoken one after the other, each of whole sentences and of `most` characters at most. */
export function partsOf(text: string, most: number): string[] {
  const pieces = (text.match(SENTENCE) ?? []).flatMap((sentence) => sentence.match(new RegExp(`[^]{1,${most}}`, "g")) ?? []);
  const parts: string[] = [];
  for (const piece of pieces) {
    const last = parts.at(-1);
    if (last !== undefined && last.length + piece.length <= most) parts[parts.length - 1] = last + piece;
    else parts.push(piece);
  }
  return parts.map((part) => part.trim()).filter((part) => part !== "");
}

class Voice {
  reading = $state.raw<unknown>(null); // what is read: whatever names it
  server = $state.raw<AudioServer | null>(null);
  readonly #own = "speechSynthesis" in globalThis;
  readonly speaks = $derived(this.#own || this.server !== null);
  #asked: AbortController | null = null;

  /** Read a text, instead of what is being read. `failed` hears why nothing can be heard. */
  read(what: unknown, text: string, failed: (why: string) => void): void {
    this.stop();
    if (!this.#own) return void this.#play(what, partsOf(text, MAX_SPOKEN), failed);
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
    this.#asked?.abort();
    if (this.#own) speechSynthesis.cancel();
  }

  /** Has the server speak each part, the next while one is heard. */
  async #play(what: unknown, parts: readonly string[], failed: (why: string) => void): Promise<void> {
    const { server } = this;
    if (server === null || parts.length === 0) return;
    const { signal } = (this.#asked = new AbortController());
    this.reading = what;
    const ask = (part: string | undefined): Promise<Blob> | null => {
      const made = part === undefined ? null : spoken(part, server, signal);
      made?.catch(() => undefined); // it is told when its turn comes
      return made;
    };
    try {
      let next = ask(parts[0]);
      for (let i = 0; next !== null; i += 1) {
        const sound = await next;
        next = ask(parts[i + 1]);
        await heard(sound, signal);
      }
    } catch (error) {
      if (!signal.aborted) failed(error instanceof DOMException ? strings.speech.failed("") : failureOf(error).message);
    }
    if (!signal.aborted) this.reading = null;
  }
}

/** Plays a sound to its end. Rejects when it is stopped or cannot be played. */
function heard(sound: Blob, signal: AbortSignal): Promise<void> {
  const url = URL.createObjectURL(sound);
  const player = new Audio(url);
  return new Promise<void>((resolve, reject) => {
    const stop = (): void => {
      player.pause();
      reject(new DOMException("stopped", "AbortError"));
    };
    if (signal.aborted) return stop();
    signal.addEventListener("abort", stop);
    player.onended = () => resolve();
    player.onerror = () => reject(new DOMException("unplayable", "NotSupportedError"));
    player.play().catch(reject);
  }).finally(() => URL.revokeObjectURL(url));
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
const records = "MediaRecorder" in globalThis && "mediaDevices" in (globalThis.navigator ?? {});

/** Hears words until it is stopped or nobody speaks. */
export class Dictation {
  on = $state(false);
  readonly hears = $derived(Recogniser !== undefined || (records && voice.server !== null));
  /** Says who hears it. */
  readonly about = $derived(Recogniser !== undefined ? strings.speech.about : strings.speech.aboutServer);
  #recognition: { stop(): void } | null = null;

  /** `heard` takes words that are sure; `failed` hears why there are none. */
  constructor(
    private readonly heard: (words: string) => void,
    private readonly failed: (why: string) => void,
  ) {}

  toggle(): void {
    if (this.on) this.#recognition?.stop();
    else if (Recogniser === undefined) void this.#record();
    else this.#start(Recogniser);
  }

  #start(Recogniser: Recogniser): void {
    const recognition = new Recogniser();
    this.#recognition = recognition;
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

  /** Records until it is stopped, and has the server write down what was said. */
  async #record(): Promise<void> {
    const { server } = voice;
    if (server === null) return;
    let stream: MediaStream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    } catch (error) {
      return this.failed(strings.speech.failed(error instanceof DOMException && error.name === "NotAllowedError" ? "not-allowed" : ""));
    }
    const recorder = new MediaRecorder(stream);
    const pieces: Blob[] = [];
    recorder.ondataavailable = ({ data }) => void pieces.push(data);
    recorder.onstop = async () => {
      stream.getTracks().forEach((track) => track.stop());
      this.on = false;
      try {
        const words = (await transcribed(new Blob(pieces, { type: recorder.mimeType }), server)).trim();
        if (words !== "") this.heard(words);
        else this.failed(strings.speech.failed(""));
      } catch (error) {
        this.failed(failureOf(error).message);
      }
    };
    this.#recognition = recorder;
    recorder.start();
    this.on = true;
  }
}
