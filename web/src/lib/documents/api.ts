/** The server's interface for documents, typed: collections, documents, their text and pages, jobs, search. */
import { request } from "../api";

export interface Fault {
  message: string;
  page: number | null;
}

export interface Document {
  id: number;
  collection: number;
  source: string; // the name it came under
  title: string;
  media_type: string;
  version: string;
  bytes: number;
  characters: number;
  chunks: number;
  pages: number; // 0: it has none
  faults: Fault[];
  created_at: number; // s
  updated_at: number;
}

export type Role = "owner" | "writer" | "reader";

export interface Shelf {
  id: number;
  name: string;
  owner: string;
  role: Role;
  documents: number;
}

export type FileStatus = "queued" | "reading" | "embedding" | "done" | "unchanged" | "failed" | "cancelled";

export interface JobFile {
  source: string;
  status: FileStatus;
  document: number | null;
  bytes: number;
  pages: number;
  chunks: number;
  embedded: number;
  error: string | null;
  faults: Fault[];
}

export interface Job {
  id: string;
  collection: number;
  status: "running" | "done" | "cancelled";
  stalled: string | null;
  files: JobFile[];
}

/** A file of a question, as its chat has it. `id` is null where it came with a file of chats. */
export interface MessageFile {
  readonly id: string | null;
  readonly name: string;
  readonly bytes: number;
  readonly status: "reading" | "ready" | "failed" | "missing";
  readonly error: string | null;
  readonly document: number | null; // that shows it
  readonly media_type: string | null;
  readonly pages: number; // 0: it has none
  readonly characters: number;
  readonly faults: readonly Fault[];
}

export interface Page {
  number: number;
  start: number; // characters of the document's text, as code points
  end: number;
  width: number | null; // points
  height: number | null;
}

/** In points from the lower left corner of a page of `width` by `height`. */
export interface Box {
  page: number;
  left: number;
  bottom: number;
  right: number;
  top: number;
  width: number;
  height: number;
}

export interface Hit {
  text: string;
  document: { id: number; title: string; source: string; collection: number };
  span: { start: number; end: number; page: number | null };
  context: string;
}

const PDF = "application/pdf";
export const isPdf = ({ media_type }: Document): boolean => media_type === PDF;

async function json<T>(path: string, init: RequestInit = {}): Promise<T> {
  return (await (await request(path, init)).json()) as T;
}

const sending = (method: string, body: object): RequestInit => ({
  method,
  headers: { "content-type": "application/json" },
  body: JSON.stringify(body),
});
const bySignal = (signal?: AbortSignal): RequestInit => (signal ? { signal } : {});

export const fileOf = (id: number): string => `/api/documents/${id}/file`;
export const pictureOf = (id: number, page: number, width: number): string =>
  `/api/documents/${id}/pages/${page}?width=${width}`;
/** The address of a document on the page, opened at a span of its text. */
export const placeIn = (id: number, span?: { start: number; end: number }): string =>
  `/documents/${id}${span ? `?start=${span.start}&end=${span.end}` : ""}`;

export async function getShelves(): Promise<Shelf[]> {
  return (await json<{ collections: Shelf[] }>("/api/collections")).collections;
}

export const makeShelf = (name: string): Promise<Shelf> => json("/api/collections", sending("POST", { name }));
export const renameShelf = (id: number, name: string): Promise<Shelf> =>
  json(`/api/collections/${id}`, sending("PATCH", { name }));

export async function deleteShelf(id: number): Promise<void> {
  await request(`/api/collections/${id}`, { method: "DELETE" });
}

export interface Member {
  user: string;
  role: "reader" | "writer";
  status: "member" | "invited";
}

export interface Invitation {
  collection: number;
  name: string;
  owner: string;
  role: "reader" | "writer";
}

export async function getInvitations(): Promise<Invitation[]> {
  return (await json<{ invitations: Invitation[] }>("/api/invitations")).invitations;
}

export const acceptInvitation = (collection: number): Promise<Shelf> =>
  json(`/api/invitations/${collection}/accept`, { method: "POST" });

export async function declineInvitation(collection: number): Promise<void> {
  await request(`/api/invitations/${collection}`, { method: "DELETE" });
}

export async function getMembers(id: number): Promise<Member[]> {
  return (await json<{ members: Member[] }>(`/api/collections/${id}/members`)).members;
}

export const share = (id: number, { user, role }: Pick<Member, "user" | "role">): Promise<Member> =>
  json(`/api/collections/${id}/members/${encodeURIComponent(user)}`, sending("PUT", { role }));

export async function unshare(id: number, user: string): Promise<void> {
  await request(`/api/collections/${id}/members/${encodeURIComponent(user)}`, { method: "DELETE" });
}

/** A page of a list, the newest first. `next`, where it is not null, is `before` of the following page. */
export interface Listed {
  readonly documents: readonly Document[];
  readonly next: string | null;
}

export function getDocuments(
  shelf: number | null,
  limit: number,
  before: string | null,
  signal?: AbortSignal,
): Promise<Listed> {
  const asked = new URLSearchParams({ limit: String(limit) });
  if (shelf !== null) asked.set("collection", String(shelf));
  if (before !== null) asked.set("before", before);
  return json(`/api/documents?${asked}`, bySignal(signal));
}

export const getDocument = (id: number, signal?: AbortSignal): Promise<Document> =>
  json(`/api/documents/${id}`, bySignal(signal));

export async function deleteDocument(id: number): Promise<void> {
  await request(`/api/documents/${id}`, { method: "DELETE" });
}

/** Characters `start` to `end` of a document's text, as far as it reaches. */
export const getText = (
  id: number,
  start: number,
  end: number,
  signal?: AbortSignal,
): Promise<{ start: number; end: number; characters: number; text: string }> =>
  json(`/api/documents/${id}/text?start=${start}&end=${end}`, bySignal(signal));

export async function getPages(id: number, signal?: AbortSignal): Promise<Page[]> {
  return (await json<{ pages: Page[] }>(`/api/documents/${id}/pages`, bySignal(signal))).pages;
}

export async function getBoxes(id: number, start: number, end: number, signal?: AbortSignal): Promise<Box[]> {
  return (await json<{ boxes: Box[] }>(`/api/documents/${id}/boxes?start=${start}&end=${end}`, bySignal(signal))).boxes;
}

/** Search one collection, or all that are listed, shared ones too. */
export async function search(query: string, shelf: number | null, signal?: AbortSignal): Promise<Hit[]> {
  const asked = { query, limit: 20, collections: shelf === null ? "all" : [shelf] };
  return (await json<{ passages: Hit[] }>("/api/search", { ...sending("POST", asked), ...bySignal(signal) })).passages;
}

export const getFile = (id: string): Promise<MessageFile> => json(`/api/files/${encodeURIComponent(id)}`);

export async function deleteFile(id: string): Promise<void> {
  await request(`/api/files/${encodeURIComponent(id)}`, { method: "DELETE" });
}

/** Adds a copy of a question's file to a collection. */
export async function keepFile(id: string, collection: number): Promise<void> {
  await request(`/api/files/${encodeURIComponent(id)}/keep`, sending("POST", { collection }));
}

export const getJob = (id: string): Promise<Job> => json(`/api/jobs/${encodeURIComponent(id)}`);

/** The jobs that are under way, the oldest first. */
export async function runningJobs(): Promise<string[]> {
  const { jobs } = await json<{ jobs: { id: string; status: string }[] }>("/api/jobs");
  return jobs.flatMap(({ id, status }) => (status === "running" ? [id] : [])).reverse();
}

export async function cancelJob(id: string): Promise<void> {
  await request(`/api/jobs/${encodeURIComponent(id)}/cancel`, { method: "POST" });
}
