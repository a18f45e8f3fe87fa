/**
 * Which language the page speaks: the one chosen here, or else the first of the browser's that there is. English comes
 * with the page, the others are loaded when they are spoken. What is on the screen changes at once.
 */
import { en, type Strings } from "./en";

const OTHERS = {
  de: async (): Promise<Strings> => (await import("./de")).de,
};
export const LANGUAGES = { en: "English", de: "Deutsch" } as const; // each in its own words
export type Language = keyof typeof LANGUAGES;

const KEY = "ponder.language";
let words = $state.raw(en);
let spoken = $state<Language>("en");

/** Every word the page says, in the language that is spoken when it is read. */
export const strings: Strings = new Proxy(en, { get: (_, name) => Reflect.get(words, name) as unknown });

/** The words of a part of the page that is loaded by itself, as `strings` are those of the page. */
export function stringsOf<T extends object>(languages: Record<Language, T>): T {
  return new Proxy(languages.en, { get: (_, name) => Reflect.get(languages[spoken], name) as unknown });
}

/** The language that was chosen, or null for the browser's. */
export function chosenLanguage(): Language | null {
  try {
    const kept = localStorage.getItem(KEY);
    return isLanguage(kept) ? kept : null;
  } catch {
    return null;
  }
}

/** Speak a language, null for the browser's, from now on in this browser. Rejects where it cannot be loaded. */
export async function chooseLanguage(language: Language | null): Promise<void> {
  await speak(language ?? browsers());
  try {
    if (language === null) localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, language);
  } catch {
    // Storage may be forbidden; the choice holds until the page is left.
  }
}

/** Speak what was chosen; English where that cannot be loaded. */
export async function speakChosen(): Promise<void> {
  await speak(chosenLanguage() ?? browsers()).catch(() => undefined);
}

async function speak(language: Language): Promise<void> {
  words = language === "en" ? en : await OTHERS[language]();
  spoken = language;
  document.documentElement.lang = language;
}

/** The first language of the browser that the page has. */
export function browsers(preferred: readonly string[] = navigator.languages): Language {
  return preferred.map((tag) => tag.split("-")[0]).find(isLanguage) ?? "en";
}

function isLanguage(tag: string | null | undefined): tag is Language {
  return tag !== null && tag !== undefined && Object.hasOwn(LANGUAGES, tag);
}
