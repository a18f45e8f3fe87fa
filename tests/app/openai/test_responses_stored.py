"""Responses that the server keeps: read, listed, continued and deleted, by those whose they are and nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseItemList
from sqlalchemy import Connection, text

from tests.app import postgres
from tests.app.conftest import Server, all_is_back
from tests.app.folding import events_of

DATABASES = postgres.DATABASES_SLOW

Json = dict[str, Any]
PATH = "/v1/responses"


@pytest.fixture(autouse=True)
def nothing_lost_by_shelf(shelf: Server) -> Iterator[None]:
    yield
    all_is_back(shelf)


def ask(http: httpx.Client, prompt: Any = "hi", **fields: Any) -> Json:
    reply = http.post(PATH, json={"model": "default", "input": prompt, "seed": 1, "max_output_tokens": 8, **fields})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def refused(reply: httpx.Response, status: int) -> Json:
    assert reply.status_code == status, reply.text
    return dict(reply.json()["error"])


def test_a_response_is_read_as_it_was_given(ana: httpx.Client) -> None:
    answer = ask(ana, metadata={"trip": "Oslo"})
    assert ana.get(f"{PATH}/{answer['id']}").json() == answer
    streamed = events_of(ana.post(PATH, json={"model": "default", "input": "hi", "stream": True}).text)[-1]["response"]
    assert ana.get(f"{PATH}/{streamed['id']}").json() == streamed


def test_a_response_is_there_as_soon_as_its_stream_says_it_is_complete(ana: httpx.Client) -> None:
    with ana.stream("POST", PATH, json={"model": "default", "input": "hi", "stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: ") and '"status":"completed"' in line and '"response.completed"' in line:
                (event,) = events_of(f"event: response.completed\n{line}\n\n")
                stored = httpx.get(f"{ana.base_url}{PATH}/{event['response']['id']}", headers=ana.headers)
                assert stored.json() == event["response"]
                return
    pytest.fail("the stream did not complete")


def test_a_conversation_goes_on_from_any_of_its_responses(ana: httpx.Client) -> None:
    one = ask(ana, "one")
    two = ask(ana, "two", previous_response_id=one["id"])
    three = ask(ana, "three", previous_response_id=two["id"], store=False)
    items: list[Any] = [{"role": "user", "content": "one"}, *one["output"]]
    items += [{"role": "user", "content": "two"}, *two["output"], {"role": "user", "content": "three"}]
    by_hand = ask(ana, items)
    assert three["usage"]["input_tokens"] == by_hand["usage"]["input_tokens"]
    assert three["output"][0]["content"] == by_hand["output"][0]["content"]
    other = ask(ana, "other", previous_response_id=one["id"])
    assert other["usage"]["input_tokens"] < three["usage"]["input_tokens"]


def test_instructions_are_not_carried_over(ana: httpx.Client) -> None:
    told = ask(ana, "one", instructions="Be brief, and be sure of what you say.")
    plain = ask(ana, "one")
    assert told["usage"]["input_tokens"] > plain["usage"]["input_tokens"]
    after = [ask(ana, [{"role": "user", "content": "x"}], previous_response_id=it["id"]) for it in (told, plain)]
    by_hand = [
        ask(ana, [{"role": "user", "content": "one"}, *it["output"], {"role": "user", "content": "x"}])
        for it in (told, plain)
    ]
    assert [a["usage"]["input_tokens"] for a in after] == [b["usage"]["input_tokens"] for b in by_hand]


def test_what_is_not_to_be_stored_is_not(ana: httpx.Client) -> None:
    answer = ask(ana, store=False)
    assert answer["store"] is False
    assert refused(ana.get(f"{PATH}/{answer['id']}"), 404)["code"] == "not_found"
    body = {"model": "default", "input": "hi", "previous_response_id": answer["id"]}
    assert refused(ana.post(PATH, json=body), 400)["code"] == "previous_response_not_found"


def test_nobody_elses_response_is_found(ana: httpx.Client, bob: httpx.Client) -> None:
    answer = ask(ana)
    at = f"{PATH}/{answer['id']}"
    for reply in (bob.get(at), bob.delete(at), bob.get(f"{at}/input_items")):
        assert refused(reply, 404)["code"] == "not_found"
    body = {"model": "default", "input": "hi", "previous_response_id": answer["id"]}
    assert refused(bob.post(PATH, json=body), 400)["param"] == "previous_response_id"
    assert ana.get(at).status_code == 200


def test_a_deleted_response_is_gone_and_so_is_what_went_through_it(ana: httpx.Client, shelf: Server) -> None:
    one = ask(ana, "a word that nobody else says: quodlibet")
    two = ask(ana, "two", previous_response_id=one["id"])
    deleted = ana.delete(f"{PATH}/{one['id']}")
    assert deleted.json() == {"id": one["id"], "object": "response", "deleted": True}
    assert refused(ana.delete(f"{PATH}/{one['id']}"), 404)["code"] == "not_found"
    assert ana.get(f"{PATH}/{two['id']}").status_code == 200
    body = {"model": "default", "input": "three", "previous_response_id": two["id"]}
    error = refused(ana.post(PATH, json=body), 400)
    assert error["code"] == "previous_response_not_found" and "deleted" in error["message"]
    left = "SELECT count(*) AS n FROM responses WHERE input LIKE '%quodlibet%'"
    kept = shelf.on_loop(shelf.app.state.ponder.store.database.rows(text(left)))
    assert kept == [{"n": 0}]


def test_input_items_are_listed_in_pages(ana: httpx.Client) -> None:
    words = ["one", "two", "three"]
    answer = ask(ana, [{"role": "user", "content": word} for word in words])
    at = f"{PATH}/{answer['id']}/input_items"
    whole = ana.get(at, params={"order": "asc"}).json()
    ResponseItemList.model_validate(whole)
    assert [item["content"][0]["text"] for item in whole["data"]] == words and not whole["has_more"]
    first = ana.get(at, params={"limit": 2}).json()
    assert [item["content"][0]["text"] for item in first["data"]] == ["three", "two"] and first["has_more"]
    rest = ana.get(at, params={"limit": 2, "after": first["last_id"]}).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["one"] and not rest["has_more"]
    for wrong in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "nothing"}, {"include": "x"}):
        assert refused(ana.get(at, params=wrong), 400)["param"] == next(iter(wrong))


def test_what_cannot_be_stored_fails_and_says_so(ana: httpx.Client, shelf: Server) -> None:
    store = shelf.app.state.ponder.store

    def rename(old: str, new: str) -> None:
        def work(db: Connection) -> None:
            db.execute(text(f"ALTER TABLE {old} RENAME TO {new}"))

        shelf.on_loop(store.database.read(work))

    rename("responses", "elsewhere")
    try:
        events = events_of(ana.post(PATH, json={"model": "default", "input": "hi", "stream": True}).text)
        assert refused(ana.post(PATH, json={"model": "default", "input": "hi"}), 500)["code"] == "internal_error"
    finally:
        rename("elsewhere", "responses")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.failed" and events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"


def test_many_at_once_are_all_stored(ana: httpx.Client) -> None:
    made: list[Json] = []
    threads = [threading.Thread(target=lambda: made.append(ask(ana))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == 8
    for answer in made:
        assert ana.get(f"{PATH}/{answer['id']}").json() == answer


def test_a_reference_stands_for_a_stored_item_of_ones_own(ana: httpx.Client, bob: httpx.Client) -> None:
    one = ask(ana, "one")
    references = [{"type": "item_reference", "id": item["id"]} for item in one["output"]]
    by_reference = ask(ana, [{"role": "user", "content": "one"}, *references, {"role": "user", "content": "two"}])
    by_hand = ask(ana, [{"role": "user", "content": "one"}, *one["output"], {"role": "user", "content": "two"}])
    assert by_reference["usage"]["input_tokens"] == by_hand["usage"]["input_tokens"]
    kept = ana.get(f"{PATH}/{by_reference['id']}/input_items").json()["data"]
    assert {item["type"] for item in kept} == {item["type"] for item in (*one["output"], {"type": "message"})}
    error = refused(bob.post(PATH, json={"model": "default", "input": references}), 400)
    assert error["param"] == "input[0].id"
    assert ana.delete(f"{PATH}/{one['id']}").status_code == 200
    assert ana.delete(f"{PATH}/{by_reference['id']}").status_code == 200
    assert ana.delete(f"{PATH}/{by_hand['id']}").status_code == 200
    refused(ana.post(PATH, json={"model": "default", "input": references}), 400)
