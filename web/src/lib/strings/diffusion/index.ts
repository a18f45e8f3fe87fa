/** What is said of masked diffusion, in the page's language. It comes with the part that says it. */
import { stringsOf } from "../language.svelte";
import { de } from "./de";
import { en, type DiffusionStrings } from "./en";

export const told = stringsOf<DiffusionStrings>({ en, de });
