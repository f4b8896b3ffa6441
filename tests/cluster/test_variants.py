"""Variants of a fleet: each request has one, and what happens to one touches the others' requests in nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.ends import end_of, until_begun
from tests.cluster.threads import CONFIG, ThreadReplica, Threads, demo
from tests.patience import limit, until
from tests.prompt.samples import byte_level
from workbench.cluster.cluster import Cluster
from workbench.cluster.fleet_model import FleetModel
from workbench.cluster.replica import fingerprint_of
from workbench.cluster.variants import VariantShares
from workbench.engine.request_handle import RequestHandle
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.progress import discard
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Finished

OTHER = CONFIG.model_copy(update={"schedule": CONFIG.schedule.model_copy(update={"max_num_seqs": 3})})
NAMES = st.sampled_from("abcd")
TENANTS = [f"tenant {number}" for number in range(40)]


class ByFront(dict[str, Any]):
    """A dict that only the front's thread may change."""

    cluster: Cluster

    def __setitem__(self, key: str, value: object) -> None:
        assert self.cluster.is_current_thread()
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        assert self.cluster.is_current_thread()
        super().__delitem__(key)


@pytest.fixture
def launcher() -> Threads:
    return Threads()


@pytest.fixture
def cluster(launcher: Threads) -> Iterator[Cluster]:
    with Cluster(CONFIG, 2, launcher=launcher, report=discard) as made:
        known = ByFront(made._deployments.variants)
        known.cluster, made._deployments.variants = made, known
        yield made


def ask(cluster: Cluster, tenant: str, tokens: int = 40) -> RequestHandle:
    asked = RequestHandle(lambda: None)
    sampling = SamplingParameters(max_tokens=tokens, temperature=0, ignore_eos=True)
    cluster.submit_to(asked, [Request(f"of {tenant}", (5, 6, 7), sampling, tenant=tenant)], True)
    return asked


def end(handle: RequestHandle) -> Finished:
    assert handle.wait(limit(60))
    found = end_of(handle.events)
    return found


def of_variant(cluster: Cluster, name: str) -> ThreadReplica:
    (number,) = (number for number, view in cluster.front.replicas.items() if view.variant == name)
    found = cluster.replicas[number]
    assert isinstance(found, ThreadReplica)
    return found


@given(st.lists(st.tuples(NAMES, st.floats(0.01, 1), st.sets(st.sampled_from(TENANTS)), st.booleans()), max_size=6))
def test_each_tenant_has_one_variant_that_serves(changes: list[tuple[str, float, set[str], bool]]) -> None:
    shares = VariantShares()
    for name, share, keys, leaves in changes:
        before = shares
        if leaves:
            shares = shares.without(name, "it is broken")
            others = {tenant: variant for tenant, variant in before.keys.items() if variant != name}
            assert name in shares.unavailable or shares.keys == others
            assert not shares.unavailable or shares.shares == before.shares  # there is no other
        elif name not in shares.shares:
            shares = shares.with_variant(name, share, keys)
            assert all(shares.of_tenant(tenant) == name for tenant in keys)
        assert sum(shares.shares.values()) == pytest.approx(1)
        assert {shares.of_tenant(tenant) for tenant in TENANTS} <= shares.shares.keys()
        assert {shares.of(Request(f"r{number}", (1,))) for number in range(40)} <= shares.shares.keys()
    assert all(shares.of(Request("r", (1,), tenant=each)) == shares.of_tenant(each) for each in TENANTS)


def test_a_variant_without_a_replica_leaves_its_requests_to_the_others(cluster: Cluster, launcher: Threads) -> None:
    cluster.deploy(OTHER, 0.1, keys=("alice", "alice, later"))
    mine, others = ask(cluster, "alice", 300), ask(cluster, "bob", 300)
    until_begun([mine])
    launcher.broken = "no memory is left"
    of_variant(cluster, "b").die()
    until(lambda: cluster.front.variants.shares == {"": 1.0})
    later = ask(cluster, "alice, later")
    assert [(end(each).reason, end(each).error) for each in (mine, others, later)] == [("length", "")] * 3
    assert end(mine).replica in cluster.replicas and len(end(mine).token_ids) == 300
    with pytest.raises(WorkbenchError, match="variant 'b': not deployed"):
        cluster.scale(1, "b")
    kept = {name: account.submitted - account.left for name, account in cluster.accounts.items()}
    assert kept == {"": 3, "b": 0}


def test_a_variant_that_alone_has_a_share_ends_its_requests_and_no_others(cluster: Cluster, launcher: Threads) -> None:
    cluster.deploy(OTHER, 0, keys=["alice"])
    mine, others = ask(cluster, "alice", 300), ask(cluster, "bob", 300)
    launcher.broken = "no memory is left"
    for each in launcher.started[:2]:
        each.die()
    assert end(others).reason == "error" and others.error == "no replica can be started: no memory is left"
    refused = ask(cluster, "carol")
    assert end(refused).ended_by == "unavailable" and end(refused).reason == "refused"
    assert end(mine).reason == end(ask(cluster, "alice")).reason == "length"


def test_tenants_with_a_key_get_its_variant_and_share_no_answers_with_others(cluster: Cluster) -> None:
    assert cluster.fingerprint == cluster.fingerprint_of("") == cluster.fingerprint_of("alice")
    cluster.deploy(OTHER, 0, keys=("alice",))
    second = of_variant(cluster, "b").number
    assert [end(ask(cluster, each)).replica == second for each in ("alice", "bob")] == [True, False]
    assert len({cluster.fingerprint, cluster.fingerprint_of("alice"), cluster.fingerprint_of("bob")}) == 3
    cluster.deploy(CONFIG, 0.5, name="c")
    assert cluster.fingerprint_of("") == ""  # by id: now one variant, now another
    cluster.deploy(OTHER, 1, name="d")
    assert cluster.config == OTHER.engine != CONFIG.engine
    assert cluster.fingerprint == fingerprint_of(Runner(OTHER.engine, demo()))
    assert cluster.model.name == "demo" and cluster.front.variants == VariantShares({"d": 1.0})


def test_a_deploy_that_fails_leaves_the_fleet_as_it_was(cluster: Cluster, launcher: Threads) -> None:
    launcher.broken, launcher.room = "no memory is left", 1
    with pytest.raises(WorkbenchError, match="no memory is left"):
        cluster.deploy(OTHER, 0.5, replicas=2)
    until(lambda: launcher.started[2].is_stopped)
    assert sorted(cluster.replicas) == [1, 2] and not cluster.starting and cluster.front.variants == VariantShares()
    launcher.broken = ""
    cluster.deploy(OTHER, 0.5)
    shares = cluster.front.variants
    for bad, words in (
        (lambda: cluster.deploy(CONFIG, 1), "variant 'b' is deployed; give another name"),
        (lambda: cluster.deploy(CONFIG, 0, name="c"), "or 0 and keys"),
        (lambda: cluster.deploy(CONFIG, 0.5, 0, "c"), "replicas: 0"),
        (lambda: cluster.deploy(CONFIG, 0.5, name="c", keys="alice"), "give a list of tenants"),
    ):
        with pytest.raises(WorkbenchError, match=words):
            bad()
    assert cluster.front.variants is shares and sorted(cluster._deployments.variants) == ["", "b"]


def test_scaling_down_keeps_what_serves_before_what_starts(cluster: Cluster, launcher: Threads) -> None:
    launcher.held = threading.Event()
    launcher.replica(2).die()
    until(lambda: cluster.starting == {3: ""} and [*cluster.replicas] == [1])
    cluster.scale(1)
    assert [*cluster.replicas] == [1] and not launcher.replica(1).is_stopped
    launcher.held.set()
    until(lambda: len(launcher.started) == 3 and not cluster.starting)
    assert end(ask(cluster, "alice")).replica == 1 and [*cluster.replicas] == [1]
    until(lambda: launcher.replica(3).is_stopped)


def test_a_model_with_another_tokenizer_is_refused() -> None:
    first = FleetModel.of(CONFIG)
    first.check_encodes_for(FleetModel.of(CONFIG))
    with pytest.raises(WorkbenchError, match="other has another tokenizer than demo"):
        first.check_encodes_for(replace(first, tokenizer=byte_level(), name="other"))
    with pytest.raises(WorkbenchError, match="another tokenizer"):
        first.check_encodes_for(replace(first, tokenizer=None))
    with pytest.raises(WorkbenchError, match="another vocabulary"):
        first.check_encodes_for(replace(first, spec=first.spec.model_copy(update={"vocab_size": 7})))
