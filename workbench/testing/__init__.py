"""Check user-defined parts against the laws that the built-in parts satisfy. Needs the package hypothesis."""

from workbench.lazy import attach

# ruff: noqa: F401
TYPE_CHECKING = False
if TYPE_CHECKING:
    from workbench.testing.attention import check_attention
    from workbench.testing.eviction import check_evict
    from workbench.testing.kv_format import check_kv_format
    from workbench.testing.policies import check_policy
    from workbench.testing.programs import check_program
    from workbench.testing.proposers import check_proposer
    from workbench.testing.rankings import check_ranking, check_search
    from workbench.testing.samplers import check_sampler

__getattr__, __dir__ = attach(__name__)
