/** What can be said against a file before it is sent. The server judges the rest, by what is in it. */
export type Refusal = "empty" | "large" | "media" | "archive" | "folder" | "twice";

export interface Candidate {
  readonly name: string;
  readonly size: number; // bytes
  readonly type: string; // as the browser guesses it
  readonly folder?: boolean;
}

const FORM = 4096; // bytes of an upload that are not the file's
const ARCHIVE = /\.(zip|rar|7z|gz|tgz|tar|bz2|xz|zst)$/i;

/** Why each of the files cannot be taken; null where nothing is known against it. `most`: bytes of an upload. */
export function refusals(files: readonly Candidate[], most: number | null): (Refusal | null)[] {
  const names = new Set<string>();
  return files.map(({ name, size, type, folder }) => {
    if (folder) return "folder";
    if (size === 0) return "empty";
    if (/^(image|audio|video)\//.test(type) && type !== "image/svg+xml") return "media";
    if (ARCHIVE.test(name)) return "archive";
    if (most !== null && size + FORM > most) return "large";
    if (names.has(name)) return "twice"; // a document is known by its name: one would replace the other
    names.add(name);
    return null;
  });
}
