/** A document of a few lines, to try answers from documents with. It goes to a collection of its own. */
import { getShelves, makeShelf } from "./api";
import { uploads } from "./uploads.svelte";

const COLLECTION = "Sample";
const FILE = "The lighthouse of Arnhook.md";
const TEXT = `# The lighthouse of Arnhook

The lighthouse of Arnhook stands on a rock two kilometres north of the harbour. It was built between 1871 and 1874 by
the engineer Ana Brandt. The tower is 38 metres high and has 196 steps.

## The lamp

The first lamp burned rapeseed oil. An electric lamp took its place in 1921. Its light can be seen from 30 kilometres
away in clear weather.

## The keepers

Three families kept the light in turn. The last keeper, Joris Vonk, left the island in 1986, when the lamp became
automatic. His house is a museum now, which is open from May to September.
`;
export const QUESTION = "Who built the lighthouse?";

/**
 * Adds the document, or finds it unchanged, and returns the number of its collection once it is read. Throws an error
 * in the server's words, or with none where the server could not be reached.
 */
export async function addSample(): Promise<number> {
  const owned = (await getShelves()).find(({ name, role }) => name === COLLECTION && role === "owner");
  const shelf = owned ?? (await makeShelf(COLLECTION));
  const [upload] = uploads.add([new File([TEXT], FILE, { type: "text/markdown" })], shelf.id);
  if (upload === undefined) throw new Error("");
  await uploads.whenOver(upload);
  if (upload.stage !== "done" && upload.stage !== "unchanged") throw new Error(upload.error ?? "");
  uploads.dismiss(upload);
  return shelf.id;
}
