export { strings } from "./language.svelte";
