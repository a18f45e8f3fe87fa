/** What is said of assistants and prompts, in the page's language. It comes with them. */
import { stringsOf } from "../language.svelte";
import { de } from "./de";
import { en, type PresetStrings } from "./en";

export const said = stringsOf<PresetStrings>({ en, de });
