import type { Role } from "../../documents/api";
import type { Refusal } from "../../documents/refuse";
import type { Upload } from "../../documents/uploads.svelte";

/** What is said of documents, in English. */
const number = new Intl.NumberFormat("en");
const count = (n: number, one: string, many: string): string => `${number.format(n)} ${n === 1 ? one : many}`;
const files = (n: number): string => count(n, "file", "files");
const documents = (n: number): string => count(n, "document", "documents");
const UNITS = ["bytes", "KB", "MB", "GB"];
const size = (bytes: number): string => {
  const power = bytes < 1000 ? 0 : Math.min(Math.floor(Math.log(bytes) / Math.log(1024)), UNITS.length - 1);
  const amount = bytes / 1024 ** power;
  return `${amount.toLocaleString("en", { maximumFractionDigits: power > 0 && amount < 10 ? 1 : 0 })} ${UNITS[power]}`;
};
const date = new Intl.DateTimeFormat("en", { dateStyle: "medium" });
const left = (s: number): string => {
  if (s < 10) return "a few seconds left";
  if (s < 90) return `about ${Math.round(s / 10) * 10} s left`;
  return s < 5400 ? `about ${Math.round(s / 60)} min left` : `about ${Math.round(s / 3600)} h left`;
};

export const en = {
  title: "Documents",
  about: "What answers can be made from. Ponder reads them on this machine, and cites the passage it used.",
  readable: "PDF, DOCX, PPTX, XLSX, HTML, Markdown, CSV, plain text and source code. Pictures and scans are not read.",
  most: (bytes: number) => `Up to ${size(bytes)} a file.`,
  empty: "No documents yet",
  emptyHere: "Nothing in this collection yet",
  dropHere: "Drop files anywhere on the page, paste them, or choose them.",
  add: "Add files",
  size,
  date: (s: number) => date.format(s * 1000),
  documents,
  loading: "Loading…",
  retry: "Retry",
  close: "Close",
  cancel: "Cancel",
  unreachable: "The server cannot be reached. Is it running?",
  failed: (why: string): string => (why === "" ? en.unreachable : why),

  collections: "Collections",
  all: "All documents",
  newCollection: "New collection",
  collectionName: "Name of the collection",
  make: "Create",
  rename: "Rename",
  save: "Save",
  more: (name: string) => `More about “${name}”`,
  askFrom: "Ask about these",
  share: "Share",
  deleteCollection: "Delete collection",
  deleteCollectionNamed: (name: string) => `Delete “${name}”?`,
  deleteCollectionAbout: (n: number) =>
    n === 0 ? "It is empty." : `Its ${documents(n)} will be deleted with it. Answers keep the passages they cited.`,
  delete: "Delete",
  role: { owner: "yours", writer: "you may add and delete", reader: "you may read" } satisfies Record<Role, string>,
  ownedBy: (owner: string) => `shared by ${owner}`,

  invitations: "Invitations",
  invited: (owner: string, name: string) => `${owner} shares “${name}” with you`,
  invitedAs: {
    reader: "You could read it and ask about it.",
    writer: "You could read it, ask about it, and add and delete documents.",
  } satisfies Record<Exclude<Role, "owner">, string>,
  accept: "Accept",
  acceptNamed: (name: string) => `Accept “${name}”`,
  decline: "Decline",
  declineNamed: (name: string) => `Decline “${name}”`,
  leave: "Leave",

  sharing: (name: string) => `Share “${name}”`,
  sharingAbout: "Who is invited decides whether to accept. A reader asks about its documents. A writer also adds and deletes them.",
  nobody: "Nobody else sees this collection.",
  user: "User",
  may: (user: string) => `What ${user} may do`,
  reader: "reader",
  writer: "writer",
  unshare: (user: string) => `Take it away from ${user}`,
  give: "Invite",
  notYet: "invited",

  listOf: (name: string) => `Documents in ${name}`,
  kind: {
    "application/pdf": "PDF",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": "DOCX",
    "application/vnd.openxmlformats-officedocument.presentationml.presentation": "PPTX",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": "XLSX",
    "text/html": "HTML",
    "text/markdown": "MD",
    "text/csv": "CSV",
    "text/x-code": "Code",
    "text/plain": "Text",
  } as Record<string, string>,
  otherKind: "File",
  pages: (n: number) => count(n, "page", "pages"),
  characters: (n: number) => count(n, "character", "characters"),
  faults: (n: number) => count(n, "remark", "remarks"),
  faultsOf: (title: string) => `What could not be read of ${title}`,
  fault: (message: string, page: number | null) => (page === null ? message : `Page ${page}: ${message}`),
  deleteDocument: (title: string) => `Delete “${title}”`,
  confirmDelete: "Delete?",
  deleted: (title: string) => `“${title}” was deleted.`,
  showMore: "Show more",

  search: "Search in documents",
  searchIn: (name: string) => `Search in ${name}`,
  clearSearch: "Clear the search",
  searching: "Searching…",
  found: (n: number) => count(n, "passage", "passages"),
  nothing: (query: string) => `Nothing about “${query}” was found.`,
  page: (n: number) => `page ${n}`,

  drop: "Drop to add",
  dropAbout: "The files become documents that answers can be made from.",
  dropToAsk: "The files go with your next message, and answers in this chat come from them.",
  adding: (n: number) => `Add ${files(n)}`,
  addingNone: "Add files",
  into: "Into the collection",
  another: "A new collection…",
  refused: (n: number) => `${files(n)} cannot be added`,
  why: (refusal: Refusal, most: number | null) =>
    ({
      empty: "The file is empty.",
      large: `Larger than the limit of ${size(most ?? 0)} for an upload.`,
      media: "Pictures, sound and video are not read.",
      archive: "Archives are not read. Add the files in it one by one.",
      folder: "Folders cannot be added. Add the files in it.",
      twice: "Another of these files has the same name.",
    })[refusal],

  uploads: "Files being added",
  progress: (going: number, over: number) => (going > 0 ? `Adding ${files(going)}` : `${files(over)} added`),
  progressFailed: (n: number, failed: number) => (n === failed ? `${files(n)} not added` : `${failed} of ${files(n)} not added`),
  into2: (name: string) => `to “${name}”`,
  left,
  stage: ({ stage, sent, bytes, chunks, embedded, cancelling, replaced }: Upload): string => {
    if (cancelling && stage !== "cancelled") return "cancelling…";
    switch (stage) {
      case "waiting":
        return "waits to be sent";
      case "sending":
        return `sending, ${size(sent)} of ${size(bytes)}`;
      case "queued":
        return "waits to be read";
      case "reading":
        return "reading and splitting";
      case "embedding":
        return embedded < chunks
          ? `embedding, ${number.format(embedded)} of ${count(chunks, "passage", "passages")}`
          : "indexing";
      case "done":
        return replaced ? "added in place of the earlier file of this name" : "added";
      case "unchanged":
        return "was there already, unchanged";
      case "failed":
        return "not added";
      case "cancelled":
        return "cancelled";
    }
  },
  heard: (name: string, stage: string, error: string | null) => `${name}: ${stage}. ${error ?? ""}`,
  cancelFile: (name: string) => `Cancel ${name}`,
  cancelAll: "Cancel all",
  retryFile: (name: string) => `Retry ${name}`,
  dismissFile: (name: string) => `Remove ${name} from this list`,
  dismissAll: "Close",
  openFile: (name: string) => `Open ${name}`,
  gone: "There is no such document. It may have been deleted.",
  toAll: "All documents",

  asPages: "Pages",
  asText: "Text",
  views: "Show as",
  download: "Download",
  pageOf: (n: number, of: number) => `Page ${n} of ${number.format(of)}`,
  goToPage: "Page",
  ofPages: (n: number) => `of ${number.format(n)}`,
  previousPage: "Previous page",
  askPage: "Ask about the picture of this page",
  nextPage: "Next page",
  zoomIn: "Zoom in",
  zoomOut: "Zoom out",
  zoom: (percent: number) => `${percent}%`,
  text: "Text of the document",
  pageFailed: (n: number) => `Page ${n} cannot be shown.`,
  pagesFailed: "The pages cannot be shown: the file is not there any more. This is its text.",
  toPassage: "To the passage",

  passageGone: "This document was deleted since. This is the passage that the answer kept.",
  passageChanged: "This document has changed since. This is the passage that the answer kept.",
  open: "Open the document",

  filesOfMessage: "Files",
  sendingFile: (sent: number, of: number) => `sending, ${size(sent)} of ${size(of)}`,
  readingFile: "being read…",
  missingFile: "Not here: an imported chat has the names of its files alone.",
  removeFile: (name: string) => `Take away ${name}`,
  mostFiles: (most: number) => `A message takes ${most} files. Send these, and the others with the next one.`,
  notAttached: (name: string, why: string) => `${name}: ${why}`,
  takeAway: (name: string) => `${name} cannot be answered from. Take it away to send your message.`,
  keep: "Add to library",
  keepFile: (name: string) => `Add ${name} to the library`,
  keepAbout: "The library keeps a copy, for all your chats. The file of this chat goes when the chat does.",
  kept: (name: string, shelf: string) => `${name} is in “${shelf}”.`,
};
