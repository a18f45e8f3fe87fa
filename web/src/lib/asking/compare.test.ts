import { describe, expect, it } from "vitest";
import { firstWays, refusedWay, runWishes } from "./compare";
import { DEFAULT, NOTHING, type Known } from "./settings";

const known: Known = { ...NOTHING, models: [{ id: "small" }, { id: "mute", thinks: false }] };

describe("ways to answer one question", () => {
  it("names the usual way, too, so that the chat's own is not taken", () => {
    const settings = { ...DEFAULT, model: "mute", strategy: "tree", options: { beam: 3 }, maxTokens: 9 };
    expect(runWishes(settings, { model: null, strategy: null })).toEqual({ max_tokens: 9, model: null, strategy: null });
    expect(runWishes(settings, { model: null, strategy: "tree" })).toMatchObject({ strategy_options: { beam: 3 } });
  });

  it("begins with what is set and the next that goes with it", () => {
    const thinking = { ...DEFAULT, effort: "high" } as const;
    expect(firstWays(DEFAULT, ["small", "mute"], ["beam"], known)[1]).toEqual({ model: "mute", strategy: null });
    expect(firstWays(DEFAULT, ["small"], ["beam"], known)[1]).toEqual({ model: null, strategy: "beam" });
    expect(firstWays(thinking, ["small", "mute"], ["beam"], known)[1]).toEqual({ model: null, strategy: null });
    expect(refusedWay(thinking, { model: "mute", strategy: null }, known)?.kind).toBe("unthinking");
  });
});
