/** What is said of files that tools made, in the page's language. It comes with the parts that say it. */
import { stringsOf } from "../language.svelte";
import { de } from "./de";
import { en, type ArtifactStrings } from "./en";

export const words = stringsOf<ArtifactStrings>({ en, de });
