/** How the next answers are to be made: chosen on the page, kept in this browser, held against what the server has. */
import { ApiError, getCollections, getModels, getStrategies, getTools, type SkillInfo, type Wishes } from "../api";
import {
  DEFAULT,
  differs,
  fitted,
  NOTHING,
  placeOf,
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
  skills = $state.raw<readonly SkillInfo[]>([]);
  gone = $state.raw<readonly Gone[]>([]); // to be told
  refusal = $state.raw<Refusal | null>(null); // of what is set now
  asked = $state(false); // the server was, whether it told anything or not
  #example: Partial<Settings> | null = null;

  constructor() {
    this.settings = stored(load());
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
    };
    if (tools !== null) {
      this.skills = tools.skills ?? [];
      this.off = [
        ...Object.entries(tools.off).map(([name, why]) => ({ name, why })),
        ...tools.faults.map(({ origin, message }) => ({ name: origin, why: message })),
      ];
    }
    const { settings, gone } = fitted(this.settings, this.known);
    if (gone.length === 0) return;
    this.gone = gone;
    this.settings = settings;
    save(settings);
  }

  change(part: Partial<Settings>): void {
    this.settings = { ...this.settings, ...part };
    this.refusal = null;
    this.gone = [];
    save(this.settings);
  }

  /** Set what an example needs, until a new chat is begun or it is changed by hand. */
  beginExample(part: Partial<Settings>): void {
    this.change(part);
    this.#example = part;
  }

  /** Take back what an example had set. */
  endExample(): void {
    const example = this.#example;
    this.#example = null;
    if (example === null) return;
    const kept = Object.keys(example) as (keyof Settings)[];
    if (kept.every((name) => this.settings[name] === example[name])) {
      this.change(Object.fromEntries(kept.map((name) => [name, DEFAULT[name]])));
    }
  }

  reset(): void {
    this.change(DEFAULT);
  }

  wishes(): Wishes {
    this.gone = [];
    this.refusal = null;
    return wishes(this.settings);
  }

  /** Take a refusal that is about what is set here; false where it is about something else. */
  refused(error: ApiError): boolean {
    if (error.status < 400 || error.status >= 500) return false;
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
