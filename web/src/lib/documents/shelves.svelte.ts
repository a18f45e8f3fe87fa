/** Collections and documents as the page lists them, and what a search in them found. Knows nothing of how they look. */
import { ApiError } from "../api";
import {
  acceptInvitation,
  declineInvitation,
  deleteDocument,
  deleteShelf,
  getDocuments,
  getInvitations,
  getShelves,
  makeShelf,
  renameShelf,
  search,
  unshare,
  type Document,
  type Hit,
  type Invitation,
  type Shelf,
} from "./api";

const PAGE = 100; // documents that are fetched at once
const MOST = 500; // that the server lists at once

export class Shelves {
  shelves = $state.raw<readonly Shelf[] | null>(null); // null: not told yet
  invitations = $state.raw<readonly Invitation[]>([]); // to others' collections, not answered yet
  documents = $state.raw<readonly Document[] | null>(null); // those that were fetched
  next = $state.raw<string | null>(null); // the place where their list goes on
  hits = $state.raw<readonly Hit[] | null>(null); // null: nothing is searched for
  searching = $state(false);
  failure = $state<string | null>(null); // in the server's words; empty: it could not be reached
  shelf = $state<number | null>(null); // null: all of them
  query = $state("");
  readonly current = $derived(this.shelves?.find(({ id }) => id === this.shelf) ?? null);
  #showing = new AbortController();
  #asking = new AbortController();

  /** Show a collection, or null for all. */
  async show(shelf: number | null): Promise<void> {
    if (shelf !== this.shelf) this.documents = this.next = null;
    this.shelf = shelf;
    await this.refresh();
    if (this.query !== "") await this.search(this.query);
  }

  async refresh(): Promise<void> {
    this.#showing.abort();
    const { signal } = (this.#showing = new AbortController());
    try {
      const [shelves, invitations] = await Promise.all([getShelves(), getInvitations()]);
      if (signal.aborted) return;
      this.invitations = invitations;
      this.shelves = shelves;
      if (this.shelf !== null && this.current === null) this.shelf = null; // it went
      const wanted = Math.max(PAGE, this.documents?.length ?? 0); // as many as are shown
      const found: Document[] = [];
      let next: string | null = null;
      do {
        const page = await getDocuments(this.shelf, Math.min(MOST, wanted - found.length), next, signal);
        found.push(...page.documents);
        ({ next } = page);
      } while (next !== null && found.length < wanted);
      this.documents = found;
      this.next = next;
      this.failure = null;
    } catch (error) {
      if (!signal.aborted) this.#failed(error);
    }
  }

  /** Fetch the next page of the list. */
  async more(): Promise<void> {
    const { signal } = this.#showing;
    if (this.next === null) return;
    try {
      const { documents, next } = await getDocuments(this.shelf, PAGE, this.next, signal);
      if (signal.aborted) return;
      const known = new Set(this.documents?.map(({ id }) => id));
      this.documents = [...(this.documents ?? []), ...documents.filter(({ id }) => !known.has(id))];
      this.next = next;
    } catch (error) {
      if (!signal.aborted) this.#failed(error);
    }
  }

  /** Look for something in what is shown; an empty query ends that. */
  async search(query: string): Promise<void> {
    this.#asking.abort();
    const { signal } = (this.#asking = new AbortController());
    this.query = query;
    this.searching = query !== "";
    if (query === "") this.hits = null;
    if (query === "") return;
    try {
      this.hits = await search(query, this.shelf, signal);
      this.failure = null;
    } catch (error) {
      if (!signal.aborted) this.#failed(error);
    }
    if (!signal.aborted) this.searching = false;
  }

  /** Make a collection and show it. Throws ApiError. */
  async make(name: string): Promise<Shelf> {
    const made = await makeShelf(name);
    await this.refresh();
    return made;
  }

  /** Throws ApiError. */
  async rename(shelf: number, name: string): Promise<void> {
    await renameShelf(shelf, name);
    await this.refresh();
  }

  /** Throws ApiError. */
  async remove(shelf: number): Promise<void> {
    await deleteShelf(shelf);
    await this.refresh();
  }

  /** Accept or decline. An invitation that was withdrawn meanwhile is not listed any more. */
  async answer(collection: number, accepted: boolean): Promise<void> {
    try {
      if (accepted) await acceptInvitation(collection);
      else await declineInvitation(collection);
    } catch (error) {
      if (!(error instanceof ApiError && error.status === 404)) return this.#failed(error);
    }
    await this.refresh();
  }

  /** Leave another's collection. Throws ApiError. */
  async leave(shelf: number, user: string): Promise<void> {
    await unshare(shelf, user);
    await this.refresh();
  }

  async removeDocument(document: number): Promise<boolean> {
    try {
      await deleteDocument(document);
    } catch (error) {
      if (!(error instanceof ApiError && error.status === 404)) {
        this.#failed(error);
        return false;
      }
    }
    this.documents = this.documents?.filter(({ id }) => id !== document) ?? null;
    this.hits = this.hits?.filter((hit) => hit.document.id !== document) ?? null;
    await this.refresh();
    return true;
  }

  #failed(error: unknown): void {
    if (!(error instanceof ApiError)) throw error;
    this.failure = error.message;
  }
}
