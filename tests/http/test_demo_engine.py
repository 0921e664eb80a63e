"""The demo engine over HTTP, held against raw answers of a real vLLM 0.32.

Each sample file holds the request that was sent and the raw answer. The same request is sent to
the demo engine; what must agree is everything but the values: status, headers, keys and their
order, nulls, kinds of values, the order of chunks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from capture_server.demo import DemoEngine, create_engine_app, running_engine

DATA = Path(__file__).parents[1] / "data"
SAMPLES = DATA / "vllm-0.32.0"  # with a reasoning parser
PLAIN_SAMPLES = DATA / "vllm-0.32.0-noreason"
TURN_END = 2


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def plain_url() -> AsyncIterator[str]:
    async with running_engine(DemoEngine(model_name="tiny", max_model_len=2048)) as url:
        yield url


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def thinking_url() -> AsyncIterator[str]:
    engine = DemoEngine(model_name="tiny", max_model_len=2048, thinking=True)
    async with running_engine(engine) as url:
        yield url


@pytest.fixture
async def client(plain_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=plain_url) as http:
        yield http


class Sample:
    """One recorded exchange."""

    def __init__(self, path: Path) -> None:
        lines = path.read_bytes().decode("utf-8").replace("\r\n", "\n").split("\n")
        self.method, self.path = lines[0].removeprefix("# ").split(" ")[:2]
        start = next(i for i, line in enumerate(lines) if line.startswith("HTTP/1.1"))
        request = [line for line in lines[:start] if line.startswith("# request: ")]
        self.request = request[0].removeprefix("# request: ") if request else None
        end = lines.index("", start)
        self.status = int(lines[start].split(" ")[1])
        pairs = [line.split(": ", 1) for line in lines[start + 1 : end]]
        self.headers = {name: value.strip() for name, value in pairs}
        body = lines[end + 1 :]
        following = [i for i, line in enumerate(body) if line.startswith("# HEAD")]
        self.text = "\n".join(body[: following[0]] if following else body)


def shape(value: Any) -> Any:
    """The value with every scalar replaced by its kind; keys stay in their order.

    A list keeps the distinct shapes of its items in order of first appearance. Keys that are
    values (token ids; token texts that map to a log-prob) are replaced too.
    """
    if isinstance(value, dict):
        by_token = all(isinstance(v, float) for v in value.values()) or all(
            key.isdigit() for key in value
        )
        if by_token:
            return ("by token", shape(list(value.values())))
        # Half a character has no bytes: whether one was sampled is chance.
        return [(k, "ints" if k == "bytes" else shape(item)) for k, item in value.items()]
    if isinstance(value, list):
        found: list[Any] = []
        for item in value:
            one = shape(item)
            if one not in found:
                found.append(one)
        return ("list", found)
    return type(value).__name__


def events(text: str) -> list[Any]:
    found = [part.removeprefix("data: ") for part in text.split("\n\n") if part.strip()]
    return [part if part == "[DONE]" else json.loads(part) for part in found]


def chunk_shape(chunk: Any) -> Any:
    return chunk if chunk == "[DONE]" else shape(chunk)


async def answered(url: str, sample: Sample) -> httpx.Response:
    """The demo engine's answer to the sample's request."""
    content = sample.request
    async with httpx.AsyncClient(base_url=url) as http:
        headers = {"content-type": "application/json"} if content is not None else {}
        return await http.request(sample.method, sample.path, content=content, headers=headers)


def assert_same_head(sample: Sample, response: httpx.Response) -> None:
    assert response.status_code == sample.status
    expected = [name for name in sample.headers if name != "x-request-id"]
    assert list(response.headers) == expected
    for name in ("content-type", "server", "vary", "allow"):
        assert response.headers.get(name) == sample.headers.get(name)


WHOLE = [
    ("plain", PLAIN_SAMPLES / "chat_ns.txt"),
    ("plain", PLAIN_SAMPLES / "kv_ids_in_chat.txt"),
    ("plain", PLAIN_SAMPLES / "tool_named_ns.txt"),
    ("thinking", SAMPLES / "chat_ns.txt"),
    ("thinking", SAMPLES / "chat_ns_n2.txt"),
    ("thinking", SAMPLES / "chat_ns_plain.txt"),
    ("thinking", SAMPLES / "chat_ns_tokid.txt"),
    ("thinking", SAMPLES / "chat_ns_topnull.txt"),
    ("thinking", SAMPLES / "chat_prompt_logprobs.txt"),
    ("thinking", SAMPLES / "chat_eos_bias.txt"),
    ("thinking", SAMPLES / "chat_stop_tok.txt"),
    ("plain", SAMPLES / "comp_batch.txt"),
    ("plain", SAMPLES / "comp_echo.txt"),
    ("plain", SAMPLES / "comp_echo_mt0.txt"),
    ("plain", SAMPLES / "comp_ns.txt"),
    ("plain", SAMPLES / "comp_ns_tokid.txt"),
    ("plain", SAMPLES / "tokenize.txt"),
    ("plain", SAMPLES / "get_v1_models.txt"),
]


@pytest.mark.parametrize(("mode", "path"), WHOLE, ids=lambda v: getattr(v, "stem", ""))
async def test_whole_answers_have_the_samples_shape(
    mode: str, path: Path, plain_url: str, thinking_url: str
) -> None:
    """A JSON answer has the sample's status, headers, keys in order, nulls and kinds."""
    sample = Sample(path)
    response = await answered(plain_url if mode == "plain" else thinking_url, sample)
    expected, found = json.loads(sample.text), response.json()

    assert_same_head(sample, response)
    assert shape(found) == shape(expected)


STREAMS = [
    ("plain", PLAIN_SAMPLES / "chat_st.txt"),
    ("plain", PLAIN_SAMPLES / "kv_ids_in_chat_st.txt"),
    ("thinking", SAMPLES / "chat_st.txt"),
    ("thinking", SAMPLES / "chat_st_usage.txt"),
    ("thinking", SAMPLES / "chat_st_n2.txt"),
    ("thinking", SAMPLES / "chat_eos_bias_st.txt"),
    ("plain", SAMPLES / "comp_st.txt"),
    ("plain", PLAIN_SAMPLES / "tool_req_st.txt"),
]


@pytest.mark.parametrize(("mode", "path"), STREAMS, ids=lambda v: getattr(v, "stem", ""))
async def test_streams_have_the_samples_chunks(
    mode: str, path: Path, plain_url: str, thinking_url: str
) -> None:
    """Opening and closing chunks are the sample's; those between are of the sample's kinds."""
    sample = Sample(path)
    response = await answered(plain_url if mode == "plain" else thinking_url, sample)
    expected, found = events(sample.text), events(response.text)
    shapes = [chunk_shape(chunk) for chunk in found]
    known = [chunk_shape(chunk) for chunk in expected]

    assert_same_head(sample, response)
    assert shapes[0] == known[0]
    for one in shapes[1:-2]:
        assert one in known or is_finish(one)
    assert tail_without_delta(found) == tail_without_delta(expected)
    assert found[-1] == "[DONE]"


def is_finish(one: Any) -> bool:
    """A finishing chunk before the last one: of another choice, or before the usage chunk."""
    return "stop_reason" in str(one)


def tail_without_delta(chunks: list[Any]) -> Any:
    """Shape of the last two chunks; whether the last delta shows text is chance."""
    closing = json.loads(json.dumps(chunks[-2:-1]))
    for chunk in closing:
        for choice in chunk["choices"]:
            choice.pop("delta", None)
            choice.pop("text", None)
    return [shape(chunk) for chunk in closing]


async def test_chunks_of_a_choice_alternate_as_in_the_sample(thinking_url: str) -> None:
    """With ``n: 2`` both openings come first, then the choices take turns."""
    sample = Sample(SAMPLES / "chat_st_n2.txt")
    found = events((await answered(thinking_url, sample)).text)

    def order(chunks: list[Any]) -> list[int]:
        return [c["choices"][0]["index"] for c in chunks[:-1] if c["choices"]]

    assert order(found) == order(events(sample.text))


SAME_BODY = [
    PLAIN_SAMPLES / "bigstop.txt",
    PLAIN_SAMPLES / "chat_dup_v1.txt",
    SAMPLES / "chat_stop_str.txt",
    SAMPLES / "err_badjson.txt",
    SAMPLES / "err_badtok.txt",
    SAMPLES / "err_ctx.txt",
    SAMPLES / "err_maxtok.txt",
    SAMPLES / "err_model.txt",
    SAMPLES / "err_toplp.txt",
    SAMPLES / "err_validation.txt",
    SAMPLES / "render_chat.txt",
    SAMPLES / "get_.txt",
    SAMPLES / "get_health.txt",
    SAMPLES / "get_ping.txt",
    SAMPLES / "get_v1_nothing.txt",
    SAMPLES / "get_version.txt",
]


@pytest.mark.parametrize("path", SAME_BODY, ids=lambda path: path.stem)
async def test_refusals_and_fixed_answers_are_the_samples(path: Path, plain_url: str) -> None:
    """Errors and constant answers agree byte for byte."""
    sample = Sample(path)
    response = await answered(plain_url, sample)

    assert_same_head(sample, response)
    assert response.text.strip() == sample.text.strip()


@pytest.mark.parametrize(
    ("path", "status"),
    [("/", 404), ("/v1/nothing", 404), ("/v1/models", 405), ("/health", 405), ("/version", 405)],
)
async def test_head_requests(path: str, status: int, client: httpx.AsyncClient) -> None:
    """HEAD is refused where GET is served, and unknown where nothing is."""
    response = await client.head(path)

    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.headers.get("allow") == ("GET" if status == 405 else None)


async def test_trailing_slash_is_redirected(client: httpx.AsyncClient) -> None:
    """As FastAPI does: 307 to the absolute address without the slash."""
    response = await client.post("/v1/chat/completions/", json={})

    assert response.status_code == 307
    assert response.headers["location"] == str(client.base_url.join("/v1/chat/completions"))


async def test_bodies_that_are_not_json(client: httpx.AsyncClient) -> None:
    """Another media type and compressed bytes are refused in the samples' words."""
    plain = await client.post(
        "/v1/chat/completions", content="x", headers={"content-type": "text/plain"}
    )
    packed = await client.post(
        "/v1/chat/completions",
        content=b"\x1f\x8b\x08\x00\xff",
        headers={"content-type": "application/json", "content-encoding": "gzip"},
    )

    assert plain.text == Sample(PLAIN_SAMPLES / "ct_plain.txt").text.strip()
    assert packed.text == Sample(PLAIN_SAMPLES / "gzip_body.txt").text.strip()
    assert plain.status_code == packed.status_code == 400


HI = [{"role": "user", "content": "Tell me a short story."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "parameters": {
            "type": "object",
            "properties": {
                "n": {"type": "integer", "minimum": 0, "maximum": 9},
                "sure": {"type": "boolean"},
                "city": {"enum": ["Łódź", "Oslo"]},
            },
            "required": ["n", "sure", "city"],
        },
    },
}


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in the server's thread."""
    async with asyncio.timeout(20):
        while not condition():  # no event reaches across the threads
            await asyncio.sleep(0.005)


async def chat(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": HI, "max_tokens": 40, "seed": 1, **fields}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    body = {"model": "tiny", "messages": HI, "max_tokens": 40, "seed": 1, **fields, "stream": True}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    chunks = events(response.text)
    assert chunks.pop() == "[DONE]"
    return chunks


async def recorded(client: httpx.AsyncClient, response_id: str) -> list[dict[str, Any]]:
    response = await client.get(f"/demo/generations/{response_id}")
    assert response.status_code == 200
    return response.json()["choices"]


ASK = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}


async def test_what_was_not_asked_for_is_null(client: httpx.AsyncClient) -> None:
    """Without the flags ids and log-probs are null, in both modes."""
    whole = await chat(client)
    chunks = await stream(client)

    assert whole["prompt_token_ids"] is None
    assert whole["choices"][0]["token_ids"] is None
    assert whole["choices"][0]["logprobs"] is None
    assert chunks[0]["prompt_token_ids"] is None
    assert all(c["choices"][0]["logprobs"] is None for c in chunks)
    assert all(c["choices"][0]["token_ids"] is None for c in chunks[1:])
    assert all(c["choices"][0]["delta"] for c in chunks[:-1])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"stop": [" a", "e "]},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "messages": [{"role": "user", "content": "Run the tests."}]},
        {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "logit_bias": {"100": 3}},
    ],
    ids=["plain", "n", "stop", "required", "auto", "sampling"],
)
async def test_stream_whole_and_record_agree(
    fields: dict[str, Any], client: httpx.AsyncClient
) -> None:
    """Same seed: the stream's ids and log-probs, the whole answer's and the record are equal."""
    whole = await chat(client, **ASK, **fields)
    chunks = await stream(client, **ASK, **fields)
    for index, choice in enumerate(whole["choices"]):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index][1:]
        ids = [i for c in own for i in c["token_ids"]]
        logprobs = [e["logprob"] for c in own for e in c["logprobs"]["content"]]
        text = "".join(c["delta"].get("content") or "" for c in own)

        assert ids == choice["token_ids"]
        assert logprobs == [e["logprob"] for e in choice["logprobs"]["content"]]
        assert text == (choice["message"]["content"] or "")
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        for response_id in (whole["id"], chunks[0]["id"]):
            record = (await recorded(client, response_id))[index]
            assert record["token_ids"] == ids
            assert record["logprobs"] == logprobs
            assert record["prompt_token_ids"] == whole["prompt_token_ids"]
    assert whole["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in whole["choices"])


async def test_a_required_call_is_made_with_values_of_its_schema(
    client: httpx.AsyncClient,
) -> None:
    """``tool_choice: required`` always calls; arguments agree between stream and whole."""
    for seed in range(5):
        fields = {"tools": [TOOL], "tool_choice": "required", "seed": seed, "max_tokens": 300}
        message = (await chat(client, **fields))["choices"][0]
        chunks = await stream(client, **fields)
        names, pieces = [], []
        for chunk in chunks:
            for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
                if "id" in call:
                    names.append(call["function"]["name"])
                    pieces.append("")
                pieces[call["index"]] += call["function"].get("arguments", "")
        whole = [c["function"] for c in message["message"]["tool_calls"]]

        assert message["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"]
        assert message["finish_reason"] == "tool_calls"
        assert names == [function["name"] for function in whole]
        assert [json.loads(p) for p in pieces] == [json.loads(f["arguments"]) for f in whole]
        for arguments in map(json.loads, pieces):
            assert set(arguments) == {"n", "sure", "city"}
            assert arguments["n"] in range(10)
            assert arguments["city"] in ("Łódź", "Oslo")


async def test_the_next_turn_may_drift_and_supplied_ids_do_not(client: httpx.AsyncClient) -> None:
    """Some answer encodes to other ids in the next prompt; given ids are used and echoed."""
    for seed in range(80):
        first = await chat(client, **ASK, seed=seed, max_tokens=100)
        choice = first["choices"][0]
        if choice["finish_reason"] != "stop" or min(choice["token_ids"][:-1]) <= 6:
            continue
        cumulative = first["prompt_token_ids"] + choice["token_ids"]
        answer = {"role": "assistant", "content": choice["message"]["content"]}
        messages = [*HI, answer, {"role": "user", "content": "Another one, please."}]
        second = await chat(client, **ASK, messages=messages)
        prompt = second["prompt_token_ids"]
        if prompt[: len(cumulative)] != cumulative:
            break
    else:
        pytest.fail("no seed drifted")
    tail_start = len(prompt) - prompt[::-1].index(TURN_END, prompt[::-1].index(TURN_END) + 1)
    supplied = cumulative + prompt[tail_start:]
    third = await chat(
        client, **ASK, messages=messages, kv_transfer_params={"prompt_token_ids": supplied}
    )

    assert third["prompt_token_ids"] == supplied
    assert third["usage"]["prompt_tokens"] == len(supplied)


@pytest.mark.parametrize("ids", [[1, 99999], [1, -1], ["1"], [True], "1", []])
async def test_bad_supplied_ids_are_refused(ids: Any, client: httpx.AsyncClient) -> None:
    """Malformed or unknown ids are a 400 that names the field."""
    body = {"messages": HI, "kv_transfer_params": {"prompt_token_ids": ids}}
    response = await client.post("/v1/chat/completions", json=body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "kv_transfer_params.prompt_token_ids"


async def test_tokenize_gives_the_prompt_of_a_chat(client: httpx.AsyncClient) -> None:
    """``/tokenize`` renders like chat does, tools included; ``/detokenize`` is the way back."""
    body = {"messages": HI, "tools": [TOOL]}
    tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
    answer = await chat(client, **body, return_token_ids=True, return_prompt_text=True)
    text = (await client.post("/detokenize", json={"tokens": tokens})).json()["prompt"]

    assert tokens == answer["prompt_token_ids"]
    assert text == answer["prompt_text"]


async def test_completion_prompts_as_text_and_as_ids_are_the_same(
    client: httpx.AsyncClient,
) -> None:
    """A text and its ids give the same answer; a batch is numbered prompt by prompt."""
    text = "The harbour town of"
    ids = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
    fields = {"max_tokens": 5, "seed": 3, "logprobs": 1, "return_token_ids": True, "n": 2}
    answers = []
    for prompt in (text, ids, [text, text], [ids, ids]):
        body = {"prompt": prompt, **fields}
        answers.append((await client.post("/v1/completions", json=body)).json()["choices"])
    one = [choice["token_ids"] for choice in answers[0]]

    assert [[c["token_ids"] for c in choices] for choices in answers] == [
        one,
        one,
        one * 2,
        one * 2,
    ]
    assert [c["index"] for c in answers[3]] == [0, 1, 2, 3]
    assert {tuple(c["prompt_token_ids"]) for c in answers[3]} == {tuple(ids)}


async def test_completion_streams_name_the_prompt_once_per_choice(
    client: httpx.AsyncClient,
) -> None:
    """Prompt ids come with a choice's first chunk and are null afterwards; ids join up."""
    body: dict[str, Any] = {"prompt": [[1, 20], [3, 4, 5]], "n": 2, "max_tokens": 3, "seed": 1}
    body |= {"return_token_ids": True, "logprobs": 0}
    whole = (await client.post("/v1/completions", json=body)).json()["choices"]
    response = await client.post("/v1/completions", json={**body, "stream": True})
    chunks = [c["choices"][0] for c in events(response.text)[:-1]]
    for choice in whole:
        own = [c for c in chunks if c["index"] == choice["index"]]
        ids, offsets = joined_tokens(own)

        assert [c["prompt_token_ids"] for c in own] == [choice["prompt_token_ids"], None, None]
        assert ids == choice["token_ids"]
        assert offsets == choice["logprobs"]["text_offset"]
        assert "".join(c["text"] for c in own) == choice["text"]


def joined_tokens(chunks: list[Any]) -> tuple[list[int], list[int]]:
    """Ids and text offsets of a completion stream's choice."""
    ids = [i for c in chunks for i in c["token_ids"]]
    return ids, [o for c in chunks for o in c["logprobs"]["text_offset"]]


async def test_echo_scores_the_prompt(client: httpx.AsyncClient) -> None:
    """Echoed log-probs of a text equal those under which it would be sampled."""
    body = {"prompt": "The harbour town", "max_tokens": 4, "seed": 1, "logprobs": 0}
    body |= {"return_token_ids": True}
    first = (await client.post("/v1/completions", json=body)).json()["choices"][0]
    whole = first["prompt_token_ids"] + first["token_ids"]
    again = {"prompt": whole, "max_tokens": 0, "echo": True, "logprobs": 0}
    echoed = (await client.post("/v1/completions", json=again)).json()["choices"][0]

    assert echoed["logprobs"]["token_logprobs"][-4:] == first["logprobs"]["token_logprobs"]
    assert echoed["logprobs"]["token_logprobs"][0] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"max_tokens": "many"}, "body.max_tokens"),
        ({"messages": "hi"}, "body.messages"),
        ({"messages": []}, "messages"),
        ({"min_tokens": 50}, "min_tokens"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 2047}, "input_tokens"),
    ],
    ids=str,
)
async def test_bad_values_are_refused(
    fields: dict[str, Any], param: str, client: httpx.AsyncClient
) -> None:
    """A value out of range is a 400 in vLLM's shape, before anything is generated."""
    body = {"messages": HI, "max_tokens": 40, **fields}
    error = (await client.post("/v1/chat/completions", json=body)).json()["error"]

    assert list(error) == ["message", "type", "param", "code"]
    assert (error["param"], error["code"]) == (param, 400)


async def test_unknown_fields_are_ignored(client: httpx.AsyncClient) -> None:
    """Like vLLM, and unlike engines that forbid them."""
    assert (await chat(client, nobody_knows={"a": 1}))["choices"]


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_stops_the_generation(streaming: bool) -> None:
    """Within one token of the disconnect the choice is cancelled and nothing runs."""
    engine = DemoEngine(token_delay_s=0.02)
    body = {"messages": HI, "max_tokens": 4000, "ignore_eos": True, "stream": streaming}
    async with (
        running_engine(engine) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        call = asyncio.create_task(http.post("/v1/chat/completions", json=body, timeout=60))
        await until(lambda: engine.num_running == 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: engine.num_running == 0)
        (response_id,) = engine.response_ids()
        (record,) = engine.records(response_id) or ()

    assert record["finish_reason"] == "cancelled"
    assert len(record["token_ids"]) < 200


@pytest.mark.parametrize("streaming", [True, False])
async def test_pause_aborts_and_holds_new_requests(streaming: bool) -> None:
    """``/pause`` ends running answers with ``abort``; a new one waits for ``/resume``."""
    sample = Sample(PLAIN_SAMPLES / ("abort_st.txt" if streaming else "abort_ns.txt"))
    engine = DemoEngine(token_delay_s=0.01)
    body = {"messages": HI, "max_tokens": 4000, "ignore_eos": True, "stream": streaming, **ASK}
    async with running_engine(engine) as url, httpx.AsyncClient(base_url=url) as http:
        call = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await until(lambda: engine.num_running == 1)
        paused = await http.post("/pause?mode=abort")
        response = await call
        waiting = asyncio.create_task(http.post("/v1/chat/completions", json={"messages": HI}))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.1)
        await http.post("/resume")
        resumed = await waiting

    assert paused.text == Sample(PLAIN_SAMPLES / "pause.txt").text.strip()
    assert resumed.status_code == 200
    if streaming:
        found, expected = events(response.text), events(sample.text)
        assert tail_without_delta(found) == tail_without_delta(expected)
        assert found[-2]["choices"][0]["finish_reason"] == "abort"
    else:
        expected, found = json.loads(sample.text), response.json()
        assert shape(found) == shape(expected)
        assert found["choices"][0]["finish_reason"] == "abort"


async def test_the_loop_stays_free_while_it_generates() -> None:
    """Other requests are answered while many long answers are generated."""
    engine = DemoEngine()
    transport = httpx.ASGITransport(create_engine_app(engine))
    body = {"messages": HI, "max_tokens": 200, "ignore_eos": True, "n": 8}
    async with httpx.AsyncClient(transport=transport, base_url="http://demo") as http:
        call = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        num_answered = 0
        while not call.done():
            await http.get("/health")
            num_answered += 1
            await asyncio.sleep(0)  # without a socket, a request alone does not yield
        response = await call

    assert response.json()["usage"]["completion_tokens"] == 8 * 200
    assert num_answered > 100


async def test_records_are_bounded() -> None:
    """Only the newest response ids are kept, and none when recording is off."""
    keeping, silent = DemoEngine(max_records=2), DemoEngine(record=False)
    ids: dict[DemoEngine, list[str]] = {keeping: [], silent: []}
    for engine, found in ids.items():
        transport = httpx.ASGITransport(create_engine_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://demo") as http:
            for _ in range(3):
                body = {"messages": HI, "max_tokens": 2}
                answer = await http.post("/v1/chat/completions", json=body)
                found.append(answer.json()["id"])
            listed = (await http.get("/demo/generations")).json()["data"]
            gone = await http.get(f"/demo/generations/{found[0]}")

        kept = found[1:] if engine is keeping else []
        assert [one["response_id"] for one in listed] == kept
        assert gone.status_code == 404


async def test_the_request_id_header_names_the_answer(client: httpx.AsyncClient) -> None:
    """``X-Request-Id`` becomes part of the response id."""
    body = {"messages": HI, "max_tokens": 1}
    response = await client.post(
        "/v1/chat/completions", json=body, headers={"x-request-id": "abc123"}
    )

    assert response.json()["id"] == "chatcmpl-abc123"


async def test_the_openai_client_understands_it(plain_url: str) -> None:
    """The official client reads answers, streams and tool calls."""
    async with openai.AsyncOpenAI(base_url=f"{plain_url}/v1", api_key="none") as api:
        messages: Any = HI
        tools: Any = [TOOL]
        whole = await api.chat.completions.create(
            model="tiny", messages=messages, n=2, seed=1, max_tokens=30, logprobs=True
        )
        called = await api.chat.completions.create(
            model="tiny", messages=messages, tools=tools, tool_choice="required", seed=1
        )
        text = ""
        async with api.chat.completions.stream(
            model="tiny", messages=messages, seed=1, max_tokens=30
        ) as chunks:
            async for chunk in chunks:
                text += chunk.delta if chunk.type == "content.delta" else ""
        completion = await api.completions.create(model="tiny", prompt="The", max_tokens=3)
        models = [model.id async for model in api.models.list()]
        with pytest.raises(openai.NotFoundError):
            await api.chat.completions.create(model="other", messages=messages)

    assert len(whole.choices) == 2
    assert text == whole.choices[0].message.content
    call: Any = (called.choices[0].message.tool_calls or [])[0]
    assert set(json.loads(call.function.arguments)) == {"n", "sure", "city"}
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 3
    assert models == ["tiny"]
