/**
 * Who is signed in. A request that is refused because nobody is waits here, and is made again when somebody has signed
 * in: so nothing on the page is lost when a session ends. Knows nothing of how one is asked to.
 */
import { ApiError, onUnauthorised, request } from "./api";

export interface Me {
  id: string;
  name: string;
  role: "operator" | "user";
}

interface Told {
  auth: "off" | "keys";
  user: Me | null;
}

const PATH = "/api/session";

class Session {
  me = $state.raw<Me | null>(null);
  kept = $state(false); // somebody signed in, and can sign out
  asking = $state(false); // somebody has to sign in
  again = $state(false); // the page was in use before
  #waiting: (() => void)[] = [];

  /** Learn who is signed in. Resolves when somebody is; a server that cannot be reached is left to others to tell. */
  async begin(): Promise<void> {
    onUnauthorised((signal) => this.#signedIn(signal));
    const nobody = await this.#ask().catch(() => false);
    if (nobody) await this.#signedIn();
  }

  /** Throws ApiError when the key is not accepted, with status 401 also where the browser keeps no cookie. */
  async signIn(key: string): Promise<void> {
    const before = this.me?.id;
    await request(PATH, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ key }),
    });
    if (await this.#ask()) throw new ApiError(401, "no_cookie", "");
    if (before !== undefined && before !== this.me?.id) location.assign("/"); // what is shown is somebody else's
    else this.#over();
  }

  async signOut(): Promise<void> {
    await request(PATH, { method: "DELETE" });
    location.assign("/");
  }

  /** Somebody may have signed in in another tab. */
  async look(): Promise<void> {
    if (this.asking && !(await this.#ask().catch(() => true))) this.#over();
  }

  #signedIn(signal?: AbortSignal | null): Promise<void> {
    this.asking = true;
    return new Promise((resolve, reject) => {
      this.#waiting.push(resolve);
      signal?.addEventListener("abort", () => reject(new DOMException("Nobody waits for this any more", "AbortError")));
    });
  }

  #over(): void {
    this.asking = false;
    for (const resolve of this.#waiting.splice(0)) resolve();
  }

  /** True where the server asks for a key and nobody has shown one. */
  async #ask(): Promise<boolean> {
    const { auth, user } = (await (await request(PATH)).json()) as Told;
    if (user !== null) {
      this.me = user;
      this.again = true;
    }
    this.kept = auth === "keys" && user !== null;
    return auth === "keys" && user === null;
  }
}

export const session = new Session();
