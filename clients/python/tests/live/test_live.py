"""The client against running indexers."""

from __future__ import annotations

import array
import os
import signal
import ssl
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest

import kvatlas
from kvatlas import BookRequest, Client, Prompt, Query, RankPlace, SelectRequest, errors
from kvatlas.engine_hashes import sglang_hashes, vllm_hashes
from kvatlas.hashing import block_hashes, sequence_hashes

from .conftest import PATIENCE, eventually, patiently


def test_find(world: Any, client: Client) -> None:
    tokens = world["prompt"]
    hashes = block_hashes(tokens, world["block_size"])
    for query in (
        Query("m", tokens=tokens), Query("m", tokens=array.array("I", tokens)), Query("m", hashes=hashes),
        Query("m", tokens=tokens, block_size=world["block_size"], ranks=[RankPlace("w1", 0)]),
        Query("m", tokens=tokens, workers=("w1",), l3="off", explain=True),
    ):
        answer = patiently(lambda: client.find(query))
        assert answer.complete and answer.blocks == len(hashes) and answer.block_size == world["block_size"]
        (best, *_) = answer.workers
        assert (best.instance, best.rank, best.device, best.total) == ("w1", 0, world["depth"], world["depth"])
        assert (best.path is not None) == query.explain
        assert answer.partitions[0].seq > 0 and answer.partitions[0].epoch.year >= 2024
        place = kvatlas.PartitionSeq(answer.partitions[0].partition, answer.partitions[0].seq)
        assert patiently(lambda: client.find(Query("m", tokens=tokens, min_seq=[place]))).workers
    addressed = patiently(lambda: client.find(
        Query("m", tokens=tokens, endpoints=["http://w1:8000", "http://none"], by_endpoint=True)))
    assert addressed.by_endpoint and addressed.by_endpoint["http://w1:8000"][0].device == world["depth"]
    assert addressed.unknown_endpoints == ("http://none",)
    within = patiently(lambda: client.find(Query("m", tokens=tokens, within=["host", "device+host"])))
    assert within.workers[0].within == (0, world["depth"])
    short = patiently(lambda: client.find(Query("m", tokens=[1])))
    assert (short.workers, short.reason) == ((), "no_whole_block")


def test_hashes_equal_the_servers_hashes(world: Any) -> None:
    for case in world["hashes"]:
        hashes = block_hashes(case["tokens"] or [], case["block_size"], lora_name=case["lora_name"],
                              cache_salt=case["cache_salt"], lookahead=case["lookahead"],
                              media=[[(int(hash), int(at)) for hash, at in block or []] for block in case["media"] or []])
        assert [str(h) for h in hashes] == (case["hashes"] or []), case
        assert [str(h) for h in sequence_hashes(hashes)] == (case["sequence_hashes"] or [])


def test_hashes_equal_the_engines_hashes(world: Any) -> None:
    for case in world["names"]:
        tokens, size = case["tokens"] or [], case["size"]
        if case["algorithm"]:
            names = vllm_hashes(tokens, size, algorithm=case["algorithm"], seed=case["seed"])
        else:
            names = sglang_hashes(tokens, size, eagle=case["eagle"])
        assert [str(n) for n in names] == (case["names"] or []), case


def test_fields_exist_on_the_server(world: Any) -> None:
    """The server has all fields of Python's messages. The test prints further fields of the server."""
    import dataclasses

    for name, fields in world["fields"].items():
        own = {f.metadata.get("wire", f.name) for f in dataclasses.fields(getattr(kvatlas, name)) if f.name != "_"}
        assert own - {"raw"} <= set(fields), name
        if more := set(fields) - own:
            print(f"{name} has also {sorted(more)}")


def test_codes_equal_the_servers_codes(world: Any) -> None:
    own = {c.CODE for c in errors.KvatlasError.__subclasses__()}
    assert own == set(world["codes"])


def test_workers_and_status(world: Any, client: Client) -> None:
    listed = patiently(client.workers)
    assert listed.complete and {"w1", "w2"} <= {w.instance for w in listed.workers}
    w1 = next(w for w in listed.workers if w.instance == "w1")
    assert (w1.model, w1.block_size, w1.blocks.device) == ("m", world["block_size"], world["depth"])
    assert w1.record and (w1.record.state, w1.record.endpoint) == ("schedulable", "http://w1:8000")
    assert w1.lease and w1.lease.state == "held" and w1.lease.expires > w1.lease.since
    status = patiently(client.status)
    assert status.ready and status.namespace == "default" and status.models[0].model == "m"
    assert len(status.partitions) == 4 and status.index.blocks.device >= world["depth"]
    assert status.raw["node"] == status.node
    assert patiently(lambda: client.status(status.node)).node == status.node


def test_a_request_from_choice_to_end(world: Any, client: Client) -> None:
    tokens, size, depth = world["prompt"], world["block_size"], world["depth"]
    blocks = len(tokens) // size

    def w1(list_: Any) -> Any:
        return next(r for r in list_ if r.worker == "w1")

    def load(prefill: int, active: int, requests: int) -> bool:
        rank = w1(client.loads("m").models[0].ranks)
        return (rank.active_prefill_tokens, rank.active_blocks, rank.active_requests) == (prefill, active, requests)

    eventually("no request is under way", lambda: load(0, 0, 0))
    advised = patiently(lambda: client.select(SelectRequest("m", tokens=tokens, advisory=True, explain=True)))
    assert (advised.worker, advised.booked) == ("w1", False) and advised.explanation and advised.worker_load
    first, second = str(uuid.uuid4()), str(uuid.uuid4())
    chosen = client.select(SelectRequest("m", tokens=tokens, request_id=first, book=True))
    assert (chosen.worker, chosen.rank, chosen.endpoint, chosen.device) == ("w1", 0, "http://w1:8000", depth)
    assert chosen.booked and chosen.request_id == first and chosen.cached_tokens == depth * size
    eventually("the request is booked", lambda: load((blocks - depth) * size, blocks, 1))
    with pytest.raises(errors.ConflictError):
        client.select(SelectRequest("m", tokens=tokens, request_id=first, book=True))
    potential = patiently(lambda: client.potential_loads(Prompt("m", hashes=block_hashes(tokens, size))))
    assert w1(potential.ranks).active_requests == 1
    other = [t + 100_000 for t in tokens]  # by a guess, w2 holds the booked prompt
    kept = patiently(lambda: client.select(SelectRequest("m", tokens=other, request_id=second, workers=["w2"])))
    assert (kept.worker, kept.booked) == ("w2", False)
    assert client.book(BookRequest("m", request_id=second)).worker == "w2"
    third = str(uuid.uuid4())
    named = client.book(BookRequest("m", request_id=third, worker="w2", tokens=other, effective_prefill_tokens=1))
    assert (named.worker, named.rank, named.request_id) == ("w2", 0, third)
    client.prefill_complete("m", first)
    client.output_block("m", first, decay_fraction=1.0)
    eventually("the prompt is computed", lambda: load(0, blocks + 1, 1))
    fourth = str(uuid.uuid4())
    client.book(BookRequest("m", request_id=fourth, worker="w1", engine_hashes=range(1, 4)))
    eventually("three more blocks are booked", lambda: load(0, blocks + 4, 2))
    for request in first, second, third, fourth:
        client.free("m", request)
    eventually("all requests have ended", lambda: load(0, 0, 0))
    with pytest.raises(errors.UnknownRequestError):
        client.free("m", first)


def test_errors(world: Any, client: Client, make: Callable[..., Client], transport: str) -> None:
    hasty = make(world[transport], absent=0.05)
    for wanted, call in (
        (errors.UnknownModelError, lambda: client.find(Query("none", tokens=[1]))),
        (errors.MissingModelError, lambda: client.find(Query("", tokens=[1]))),
        (errors.MalformedError, lambda: client.find(Query("m", tokens=[1], workers=[]))),
        (errors.BadTokensError, lambda: client.find(Query("m", tokens=[-1]))),
        (errors.BlockSizeMismatchError, lambda: client.find(Query("m", tokens=[1], block_size=7))),
        (errors.UnknownRequestError, lambda: client.prefill_complete("m", "never booked")),
        (errors.NoWorkersError, lambda: hasty.select(SelectRequest("m", tokens=[1], required_taints=["none"]))),
        (errors.TooLargeError, lambda: client.find(Query("m", tokens=range(1 << 21)))),
        (errors.UnavailableError, lambda: hasty.status("no-such-node")),
    ):
        with pytest.raises(errors.KvatlasError) as e:
            patiently(call)
        assert type(e.value) is wanted and e.value.code == wanted.CODE and e.value.message


def test_token_and_tls(world: Any, make: Callable[..., Client]) -> None:
    s = world["secured"]
    trusted = ssl.create_default_context(cafile=s["ca"])
    assert patiently(make(s["http"], token=s["token"], tls=trusted).status).ready
    with pytest.raises(errors.UnauthorizedError):
        patiently(make(s["http"], tls=trusted).status)
    with pytest.raises(errors.UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):  # without retries
        make(s["http"], token=s["token"]).status()


def test_no_indexer(world: Any, make: Callable[..., Client]) -> None:
    with pytest.raises(errors.UnavailableError, match="cannot be reached"):
        make(world["nobody"], absent=0.05).find(Query("m", tokens=[1]))
    with pytest.raises(errors.NotReadyError, match='no indexer of namespace "other"'):
        make(world["nats"], absent=0.05, namespace="other").find(Query("m", tokens=[1]))
    with pytest.raises(errors.UnavailableError):
        make("nats://" + world["nobody"].removeprefix("http://"), timeout=0.5).find(Query("m", tokens=[1]))
    with pytest.raises(ValueError, match="namespace"):
        make(world["nats"], namespace="Other")


def test_a_node_is_killed(world: Any) -> None:
    """Clients over HTTP and NATS get an answer to every query, while the test kills one of two nodes."""
    cluster, why = world["cluster"], list[str]()
    asked = {"http": 0, "nats": 0}
    stop, trouble = threading.Event(), list[BaseException]()

    def ask_on(name: str, urls: Any) -> None:
        with Client(urls, timeout=PATIENCE, absent=PATIENCE, asked_again=why.append) as c:
            while not stop.is_set() and not trouble:
                try:
                    answer = patiently(lambda: c.find(Query("m", tokens=world["prompt"])))
                    assert [(w.instance, w.device) for w in answer.workers] == [("w1", world["depth"])], answer
                    asked[name] += 1
                except BaseException as e:
                    trouble.append(e)

    def more() -> None:
        before = dict(asked)
        eventually("both clients get more answers", lambda: trouble or all(asked[k] >= before[k] + 50 for k in asked))

    threads = [threading.Thread(target=ask_on, args=(name, cluster[name])) for name in asked]
    for t in threads:
        t.start()
    try:
        more()
        os.kill(cluster["pid"], signal.SIGKILL)
        more()
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert not trouble
    assert "absent" in why or "lost" in why
