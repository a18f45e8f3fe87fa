/** The sub-agents of an answer, each under the call that delegates to it. Knows nothing of drawing. */
import type { AgentDone, AgentStarted } from "../protocol";
import type { Call } from "./tools";

export interface SubAgent {
  readonly id: string;
  readonly callId: string; // of the call that delegates
  readonly instructions: string;
  readonly tools: readonly string[]; // that it may call
  readonly state: "running" | "done" | "failed" | "cut"; // cut: its run ended first
  readonly done: Omit<AgentDone, "type" | "agent" | "failed"> | null;
}

export function reduceAgents(agents: readonly SubAgent[], event: AgentStarted | AgentDone): readonly SubAgent[] {
  const at = agents.findIndex((agent) => agent.id === event.agent);
  if (event.type === "agent.started") {
    const { agent: id, call_id: callId, instructions, tools } = event;
    return at < 0 ? [...agents, { id, callId, instructions, tools, state: "running", done: null }] : agents;
  }
  const agent = agents[at];
  if (agent === undefined) return agents;
  const { text, limit, tokens, seconds } = event;
  return agents.with(at, { ...agent, state: event.failed ? "failed" : "done", done: { text, limit, tokens, seconds } });
}

/** The sub-agents of a run that has ended. */
export const agentsEnded = (agents: readonly SubAgent[]): readonly SubAgent[] =>
  agents.map((agent) => (agent.state === "running" ? { ...agent, state: "cut" } : agent));

/** A call that delegates, with the sub-agents below it and their calls. */
export interface Delegated {
  readonly agents: readonly SubAgent[];
  readonly calls: (agent: SubAgent) => readonly Call[];
}

/** What a call has delegated; null where that is nothing. */
export function delegatedBy(call: Call, agents: readonly SubAgent[], calls: readonly Call[]): Delegated | null {
  const own = agents.filter((agent) => agent.callId === call.id);
  return own.length === 0 ? null : { agents: own, calls: (agent) => calls.filter((each) => each.agent === agent.id) };
}
