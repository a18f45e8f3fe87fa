/**
 * How the next answers are to be made: chosen on the page, kept with the chat, held against what the server has. A new
 * chat begins as was chosen last in this browser.
 */
import {
  ApiError,
  getCollections,
  getModels,
  getStrategies,
  getTools,
  type KeptSettings,
  type RunWishes,
  type Wishes,
} from "../api";
import { runWishes, type Way } from "./compare";
import {
  DEFAULT,
  differs,
  fitted,
  NOTHING,
  placeOf,
  settingsOf,
  stored,
  wishes,
  type Gone,
  type Known,
  type Place,
  type Settings,
} from "./settings";

const KEY = "ponder.settings";

export interface Refusal extends Place {
  readonly message: string;
}

/** Tools that are not there: each with what would bring it, or what is wrong with it. */
export interface Off {
  readonly name: string;
  readonly why: string;
}

export class Asking {
  settings = $state.raw<Settings>(DEFAULT);
  known = $state.raw<Known>(NOTHING);
  off = $state.raw<readonly Off[]>([]);
  gone = $state.raw<readonly Gone[]>([]); // to be told
  refusal = $state.raw<Refusal | null>(null); // of what is set now
  asked = $state(false); // the server was, whether it told anything or not
  ways = $state.raw<readonly Way[]>([]); // that the next question is asked in, side by side; none: as it is set
  preset: string | null = null; // the id of the one that all this comes from, until a chat is begun with it
  changed: () => void = () => undefined; // hears of every change by hand
  #last: Settings; // what was chosen last
  #before: Settings | null = null; // what was set before an example

  /** `apart`: what something else than a chat keeps. It is not how new chats begin. */
  constructor(private readonly apart: KeptSettings | null = null) {
    this.settings = this.#last = apart === null ? stored(load()) : settingsOf(apart);
  }

  /** Ask the server what there is. What it does not tell stays as it was. */
  async refresh(): Promise<void> {
    const [models, strategies, tools, collections] = await Promise.all([
      told(getModels()),
      told(getStrategies()),
      told(getTools()),
      told(getCollections()),
    ]);
    this.asked = true;
    this.known = {
      models: models ?? this.known.models,
      efforts: strategies?.efforts ?? this.known.efforts,
      strategies: strategies?.strategies ?? this.known.strategies,
      tools: tools?.tools ?? this.known.tools,
      collections: collections?.filter(({ documents }) => documents > 0) ?? this.known.collections,
      skills: tools === null ? (this.known.skills ?? null) : (tools.skills ?? []),
    };
    if (tools !== null) {
      this.off = [
        ...Object.entries(tools.off).map(([name, why]) => ({ name, why })),
        ...tools.faults.map(({ origin, message }) => ({ name: origin, why: message })),
      ];
    }
    this.#fit();
  }

  /** Leave out, and tell, what the server does not have. */
  #fit(): void {
    const last = fitted(this.#last, this.known);
    if (last.gone.length > 0) this.choose(last.settings);
    const { settings, gone } = fitted(this.settings, this.known);
    if (gone.length === 0) return;
    this.gone = gone;
    this.settings = settings;
  }

  change(part: Partial<Settings>): void {
    this.settings = { ...this.settings, ...part };
    this.choose(this.settings);
    this.refusal = null;
    this.gone = [];
    this.#before = null;
    this.changed();
  }

  /** Choose how new chats begin. */
  choose(part: Partial<Settings>): void {
    this.#last = { ...this.#last, ...part };
    if (this.apart === null) save(this.#last);
  }

  /** Go on as a chat or a preset says, or null as was chosen last. Returns what would be sent for what it says. */
  adopt(kept: KeptSettings | null, preset: string | null = null): string {
    this.preset = preset;
    this.refusal = null;
    this.gone = [];
    this.#before = null;
    this.settings = kept === null ? this.#last : settingsOf(kept);
    const told = kept === null ? "" : JSON.stringify(wishes(this.settings));
    this.#fit();
    return told;
  }

  /** Set what an example needs, for the chat that it begins; null: take back what one before it had set. */
  example(part: Partial<Settings> | null): void {
    const before = this.#before ?? this.settings;
    this.#before = part === null ? null : before;
    this.settings = { ...before, ...part };
  }

  reset(): void {
    this.change(DEFAULT);
  }

  /** What is sent for each of the ways. */
  compared(): readonly RunWishes[] {
    return this.ways.map((way) => runWishes(this.settings, way));
  }

  /** What would be sent now. */
  current(): Wishes {
    return wishes(this.settings);
  }

  wishes(): Wishes {
    this.gone = [];
    this.refusal = null;
    return wishes(this.settings);
  }

  /** Take a refusal that is about what is set here; false where it is about something else. */
  refused(error: ApiError): boolean {
    if (error.status < 400 || error.status >= 500) return false;
    if (error.code === "preset_not_found") this.adopt(null); // what it said is not to be asked without it
    const place = placeOf(error.param, error.code, this.settings, this.known);
    if (place === null) return false;
    this.refusal = { ...place, message: error.message };
    return true;
  }
}

const told = <T>(asked: Promise<T>): Promise<T | null> => asked.catch(() => null);

/** Storage may be forbidden; what is chosen then holds until the page is left. */
function load(): string | null {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

function save(settings: Settings): void {
  try {
    if (differs(settings)) localStorage.setItem(KEY, JSON.stringify(settings));
    else localStorage.removeItem(KEY);
  } catch {
    // As above.
  }
}
