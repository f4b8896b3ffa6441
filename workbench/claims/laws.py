"""Check the laws of a technique: apply the conformity kit of its kind to the parts that its settings name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from workbench.claims.comparison import TECHNIQUE, Kind
from workbench.claims.technique import LoadedTechnique, experiment_of
from workbench.experiment.experiment import Experiment
from workbench.kv_cache.format import CacheFormat
from workbench.request import CustomPart
from workbench.speculative.config import DraftModel, NoSpeculation
from workbench.testing.attention import check_attention
from workbench.testing.eviction import check_evict
from workbench.testing.kv_format import check_kv_format
from workbench.testing.law import ConformityReport
from workbench.testing.policies import check_policy
from workbench.testing.proposers import check_proposer
from workbench.testing.rankings import check_ranking, check_search
from workbench.testing.samplers import check_sampler

SMALL_PAGES = {"page_size": 4, "keep": 2}  # for the kit's short texts
Arguments = dict[str, Any]  # `examples`, to try fewer than the kit's default


def check_technique(technique: LoadedTechnique, examples: int | None = None) -> tuple[ConformityReport, ...]:
    """Check the parts of a technique against the laws of their kind, and return one report per part.

    Args:
        technique: any technique. One without a part is checked as a setting of the engine; sampling settings
            have no kit and give no report.
        examples: number of examples per law; None is the kit's default.
    """
    more = {} if examples is None else {"examples": examples}
    return tuple(_KITS[technique.settings.kind](experiment_of(technique).variant(TECHNIQUE), more))


def _attention(variant: Experiment, more: Arguments) -> Iterator[ConformityReport]:
    change = variant.attention.model_dump(exclude_defaults=True)
    single = [getattr(variant.attention, name, None) for name in change]
    if len(single) == 1 and isinstance(single[0], CustomPart) and set(change) <= {"mask", "score", "pages", "module"}:
        small = SMALL_PAGES if "pages" in change else {}
        yield check_attention(single[0].path, arguments={**single[0].arguments, **small}, **more)
    elif change:
        yield check_attention(change, **more)


def _format(variant: Experiment, more: Arguments) -> Iterator[ConformityReport]:
    names = CacheFormat.model_fields
    given = variant.cache.model_dump(exclude_defaults=True, include=set(names))
    if given:
        yield check_kv_format(given, **more)


def _eviction(variant: Experiment, more: Arguments) -> Iterator[ConformityReport]:
    policy: Any = variant.cache.evict
    if policy is not None:
        yield check_evict(policy, **more)


def _sampling(variant: Experiment, more: Arguments) -> Iterator[ConformityReport]:
    parts = [*variant.sampling.filters, *[part for part in (variant.sampling.sampler,) if part is not None]]
    for part in parts:
        yield check_sampler(part.path, arguments=part.arguments, **more)
    if (ranking := variant.sampling.ranking) is not None:
        yield check_ranking(ranking.path, arguments=ranking.arguments, **more)
    if (search := variant.sampling.search) is not None:
        yield check_search(search.path, arguments=search.arguments, **more)


def _draft(variant: Experiment, more: Arguments) -> Iterator[ConformityReport]:
    if not isinstance(variant.speculate, NoSpeculation):
        own_layers = isinstance(variant.speculate, DraftModel) and variant.speculate.layers is not None
        arguments: Arguments = {**more, "model": variant.model.name} if own_layers else more
        yield check_proposer(variant.speculate, **arguments)


def _schedule(variant: Experiment, more: Arguments) -> Iterator[ConformityReport]:
    yield check_policy(variant.schedule.policy, kind=variant.schedule.kind, **more)


_KITS: dict[Kind, Callable[[Any, Arguments], Iterator[ConformityReport]]] = {
    "attention": _attention,
    "format": _format,
    "eviction": _eviction,
    "sampling": _sampling,
    "draft": _draft,
    "schedule": _schedule,
}
