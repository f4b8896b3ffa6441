"""Run a rank other than 0: load the part of the model that it computes, then execute the commands of rank 0.

`RankProcesses` starts it with `python -m`; under torchrun, `python -m workbench` runs it in all processes except rank
0.
"""

from __future__ import annotations

from typing import Any

from workbench.engine.config import EngineConfig, parse_dtype
from workbench.engine.loaded_model import LOAD, LoadedModel
from workbench.errors import WorkbenchError
from workbench.kv_cache.store import KVStore
from workbench.tensor_parallel.distributed import end_process
from workbench.tensor_parallel.executor import tasks_of
from workbench.tensor_parallel.processes import join_ranks
from workbench.tensor_parallel.ranks import Ranks
from workbench.tensor_parallel.transformer import TensorParallelTransformer


class RankState:
    """The model and settings of a rank, as commands of rank 0 have set them."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def load(self, settings: dict[str, Any]) -> None:
        self.config = EngineConfig.model_validate(settings)
        self.ranks.timeout = self.config.parallel.rank_timeout
        model = LoadedModel.load_rank(self.config, self.ranks).transformer
        assert isinstance(model, TensorParallelTransformer)
        self.model = model

    def open_store(self, num_pages: tuple[int, ...], page_size: int, dtype: str, shapes: str) -> KVStore:
        """Open the pages of this rank. Raises WorkbenchError if their layout differs from rank 0's."""
        specs = self.model.cache_shapes(self.config.cache)
        if repr(specs) != shapes:
            raise WorkbenchError(f"its cache has another layout than rank 0's: {specs[0]}")
        return KVStore(specs, num_pages, page_size, parse_dtype(dtype), str(self.model.device))


def main() -> None:
    try:
        state = RankState(ranks := join_ranks())
        ranks.serve({LOAD: state.load, **tasks_of(lambda: state.model, state.open_store)})
    except (WorkbenchError, SystemExit) as error:  # no connection, a lost rank, or an error of this one
        end_process(error)


if __name__ == "__main__":
    main()
