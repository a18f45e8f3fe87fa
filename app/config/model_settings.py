"""Settings of the served models: their names, the remote ones, and the router's order of asking them.

Knows nothing of how they run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, field_validator

from app.config.names import AUTO_NAME, BUNDLED_MODEL, DEFAULT_NAME, BadSetting, CommaSeparated, setting
from app.config.remote_settings import AudioSettings, RemoteSettings

ToolParserName = Literal["auto", "hermes", "llama3_json", "llama4_json", "qwen3_coder", "mistral", "harmony", "gemma4"]


class ModelSettings(BaseModel):
    model: str = setting(
        BUNDLED_MODEL,
        "the model: a directory in Hugging Face format, a GGUF file, or a Hub name",
        accepts="a model directory, a .gguf file, or a Hugging Face Hub name",
        min_length=1,
    )
    served_model_name: str | None = setting(
        None,
        "the model's name for clients",
        accepts="the name that clients ask for",
        unset="the directory's or file's",
        min_length=1,
    )
    models: dict[str, str] = setting(
        {},
        "further models by their names for clients",
        more='`[models]` with `small = "models/pebble-draft"` (`--also small=models/pebble-draft`, repeatable), see '
        "[several models](#several-models)",
        accepts="NAME=DIR or NAME=HUB-NAME, or a table of them: further models by the names that clients ask for",
        flag="--also",
    )
    lora: dict[str, str] = setting(
        {},
        "[LoRA adapters](adapters.md) of the first model by their names for clients",
        more='`[lora]` with `sql = "adapters/sql"` (`--lora sql=adapters/sql`, repeatable)',
        accepts="NAME=DIR or NAME=HUB-NAME, or a table of them: adapters by the names that clients ask for",
        flag="--lora",
    )
    max_loras: int = setting(
        16,
        "LoRA adapters that are resident for steps at once",
        more="any number is known, and [comes in when it is asked for](adapters.md#more-than-are-resident)",
        accepts="adapters, 1 or more",
        ge=1,
    )
    max_cpu_loras: int | None = setting(
        None,
        "LoRA adapters that are kept in memory as they were read",
        more="others are read from their files again",
        accepts="adapters, 1 or more",
        unset="max_loras",
        ge=1,
    )
    pinned_loras: CommaSeparated = setting(
        (),
        "names in `lora` that stay resident, comma-separated",
        accepts="names in lora, comma-separated, fewer than max_loras or all of them",
    )
    allow_runtime_lora: bool = setting(
        False,
        "lets operators load and unload LoRA adapters of files that the server can read",
        more="by [`/v1/load_lora_adapter`](adapters.md#while-the-server-runs), not with `api_workers`",
        accepts="true or false",
    )
    remote: tuple[RemoteSettings, ...] = setting(
        (),
        "[remote models](#remote-models): servers with OpenAI's or Anthropic's API, each under a name of its own",
        more="`[[remote]]` with `name`, `url` and `model`",
        accepts=f"a list of tables, each of {', '.join(RemoteSettings.model_fields)}",
    )
    audio: AudioSettings | None = setting(
        None,
        "the server that [hears and speaks](#speech), by OpenAI's API, at an address such as `https://host/v1`",
        more="`[audio]` with `url` (`--audio-url`), and perhaps others",
        accepts=f"an address such as https://host/v1, or a table of {', '.join(AudioSettings.model_fields)}",
        flag="--audio-url",
    )
    diffusion_model: str | None = setting(
        None,
        "a [masked-diffusion model](diffusion.md#on-a-server) beside the others, which fills gaps on a page of its own",
        accepts="the directory of a masked-diffusion model, or its Hugging Face Hub name",
        min_length=1,
    )
    router: CommaSeparated = setting(
        (),
        "the models that `auto` asks, in order: two or more names, comma-separated",
        accepts="names of two or more served models, comma-separated, in the order they are asked",
        unset="all, the smallest first",
    )
    router_gate: Literal["confidence", "first_tokens", "entropy", "whole"] = setting(
        "confidence",
        "the measure that decides whether `auto` asks the next model",
        more="`confidence`, `first_tokens`, `entropy` or `whole`",
        accepts="confidence, first_tokens, entropy or whole",
    )
    router_bar: float | None = setting(
        None,
        "the measure at which an answer is accepted",
        accepts="0 to 1 for confidence and first_tokens, 0 or more nats for entropy, none for whole",
        unset="by the gate",
        ge=0,
        allow_inf_nan=False,
    )
    tool_call_parser: ToolParserName = setting(
        "auto",
        "the format of the first model's tool calls",
        more="`hermes`, `llama3_json`, `llama4_json`, `qwen3_coder`, `mistral`, `harmony` or `gemma4`; `auto` takes it "
        "from the chat template, see [structured output](structured-output.md#tool-call-parsers)",
        accepts="auto, hermes, llama3_json, llama4_json, qwen3_coder, mistral, harmony or gemma4",
    )

    @field_validator("audio", mode="before")
    @classmethod
    def _address(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str) else value

    @field_validator("models", "lora", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        if not isinstance(value, list):
            return value
        pairs = [str(each).partition("=") for each in value]
        if bad := [name + sign + model for name, sign, model in pairs if not (name and model)]:
            raise ValueError(f"{bad[0]!r} is no pair")
        if twice := [name for at, (name, _, _) in enumerate(pairs) if name in {each[0] for each in pairs[:at]}]:
            raise ValueError(f"{twice[0]!r} is there twice")
        return {name: model for name, _, model in pairs}

    @property
    def model_name(self) -> str:
        """The first model's name: the given one, or its directory's or file's, or its whole name on the Hub."""
        from engine.model.loader import name_of  # with the engine, which settings alone do without

        return self.served_model_name or name_of(find_model(self.model))

    def check_models(self) -> None:
        """Checks that the models have a name each, and that the router's settings fit them. Called before serving.

        Raises:
            BadSetting: which do not go together, and what is accepted.
        """
        taken = {self.model_name: "the name of model", DEFAULT_NAME: "the first model", AUTO_NAME: "the router"}
        for name, model in self.models.items():
            if not (name and model):
                raise BadSetting(f"models has {name!r} = {model!r}; accepted: a name and a directory or Hub name.")
            if name in taken:
                raise BadSetting(f"models has {name!r}, which is {taken[name]}; accepted: another name.")
            taken[name] = "one of models"
        for name, adapter in self.lora.items():
            if not (name and adapter):
                raise BadSetting(f"lora has {name!r} = {adapter!r}; accepted: a name and a directory or Hub name.")
            if name in taken:
                raise BadSetting(f"lora has {name!r}, which is {taken[name]}; accepted: another name.")
            taken[name] = "one of lora"
        pinned = set(self.pinned_loras)
        if not pinned <= self.lora.keys() or len(pinned) > self.max_loras - (len(self.lora) > len(pinned)):
            raise BadSetting(
                f"pinned_loras is {', '.join(self.pinned_loras)}, and max_loras is {self.max_loras}; accepted: names "
                "in lora, fewer than max_loras or all of them."
            )
        for remote in self.remote:
            if remote.name in taken:
                raise BadSetting(f"remote has {remote.name!r}, which is {taken[remote.name]}; accepted: another name.")
            taken[remote.name] = "another remote"
        if self.has_router and self.model_name == AUTO_NAME:
            raise BadSetting("model is called 'auto', which is the router; accepted: another served_model_name.")
        if len(asked := [remote.name for remote in self.remote if remote.auto]) > 1:
            raise BadSetting(f"auto is true of the remotes {' and '.join(asked)}; accepted: true of one at most.")
        self._check_router()

    @property
    def has_router(self) -> bool:
        """Returns whether there is a router: several models, or a remote one that it may ask."""
        return bool(self.models) or any(remote.auto for remote in self.remote)

    def _check_router(self) -> None:
        given = [name for name in ("router", "router_gate", "router_bar") if name in self.model_fields_set]
        if given and not self.has_router:
            raise BadSetting(
                f"{given[0]} is set, and one model alone is served; accepted: {given[0]} not set, or more models "
                "(--also NAME=DIR)."
            )
        served = (self.model_name, *self.models)
        if bad := [name for name in self.router if name not in served]:
            raise BadSetting(f"router has {bad[0]!r}, which is not served; accepted: {', '.join(served)}.")
        if self.router and len(set(self.router)) != max(2, len(self.router)):
            raise BadSetting(f"router is {', '.join(self.router)}; accepted: two or more models, each once.")
        if self.router_bar is not None:
            if self.router_gate == "whole":
                raise BadSetting("router_bar is set, and the gate 'whole' has none; accepted: router_bar not set.")
            if self.router_gate in ("confidence", "first_tokens") and self.router_bar > 1:
                raise BadSetting(f"router_bar is {self.router_bar:g}; accepted: a probability, 0 to 1.")


def find_model(model: str) -> str:
    """`model` itself, except that the bundled model is also found beside the code when started from elsewhere."""
    if model == BUNDLED_MODEL and not Path(model).exists():
        beside_code = Path(__file__).resolve().parents[2] / BUNDLED_MODEL
        if beside_code.exists():
            return str(beside_code)
    return model
