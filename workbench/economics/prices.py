"""Define token usage by kind, price tables, and the cost of tokens on a rented machine. Amounts of money are exact
fractions of a currency unit."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from workbench.errors import WorkbenchError, explain, nearest
from workbench.files import UnreadableText, read_yaml_file
from workbench.settings import Count, Settings

KINDS = ("input", "cache_write_5m", "cache_write_1h", "cache_read", "output")
token_counts = attrgetter(*KINDS)
TABLES = Path(__file__).resolve().parent / "tables"
MILLION = 1_000_000
DEFAULT_TABLE = "article-a"  # the shipped table with every price that the articles name
Money = Annotated[Decimal, Field(ge=0, allow_inf_nan=False)]  # in a currency unit
Price = Money  # per million tokens
HOUR = 3600


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens by kind, each counted once: `input` tokens are neither read from nor written to the cache."""

    input: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0
    cache_read: int = 0
    output: int = 0

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return ((kind, getattr(self, kind)) for kind in KINDS)

    def __add__(self, other: Usage) -> Usage:
        return total_usage((self, other))

    @property
    def written(self) -> int:
        return self.cache_write_5m + self.cache_write_1h

    @property
    def prompt(self) -> int:
        """Return the number of prompt tokens of all kinds: uncached, read from the cache, and written to it."""
        return self.input + self.written + self.cache_read


def total_usage(usages: Iterable[Usage]) -> Usage:
    columns = zip(*(token_counts(usage) for usage in usages), strict=True)
    return Usage(*map(sum, columns))


class PublishedFigures(Settings):
    """Figures that the source of a price table publishes for one workload: `requests` per day with a system prompt of
    `prompt` tokens."""

    prompt: Count
    requests: Count
    uncached: Price  # cost per day without caching
    saved: Price  # saving per day by caching
    share: Price  # saving as a fraction of the bill without caching
    requests_per_ttl: Count


class Prices(Settings):
    """Prices per million tokens by kind. A table has all three prompt cache prices or none."""

    name: str
    source: str  # origin of the prices
    date: datetime.date  # day on which the source was read
    currency: str = "USD"
    example: bool = False  # an example for calculations, not a vendor's prices
    input: Price
    output: Price
    cache_write_5m: Price | None = None
    cache_write_1h: Price | None = None
    cache_read: Price | None = None
    says: tuple[PublishedFigures, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> Prices:
        writes = self.cache_write_5m is not None or self.cache_write_1h is not None
        if writes != (self.cache_read is not None):
            raise ValueError("a prompt cache has a price of reads and of one write at least: give both, or neither")
        return self

    @classmethod
    def from_values(cls, values: Mapping[str, Any], where: str = "prices") -> Prices:
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise explain(error, where, cls) from None

    def token_price(self, kind: str) -> Fraction:
        """Return the price of one token of a kind. Raises WorkbenchError if the table has no such price."""
        price = getattr(self, kind) if kind in KINDS else None
        if price is None:
            known = ", ".join(name for name in KINDS if getattr(self, name) is not None)
            raise WorkbenchError(f"prices {self.name}: there is no price of {kind}; it has {known}")
        return Fraction(price) / MILLION

    def cost(self, usage: Usage) -> Fraction:
        return sum((count * self.token_price(kind) for kind, count in usage if count), Fraction(0))

    def scaled(self, factor: Fraction | int) -> Prices:
        """Return the table with every price multiplied by `factor`, marked as an example."""
        changed = {kind: getattr(self, kind) for kind in KINDS}
        changed = {kind: None if old is None else _decimal(Fraction(old) * factor) for kind, old in changed.items()}
        name = f"{self.name} times {Fraction(factor)}"
        return self.model_copy(update={**changed, "name": name, "example": True, "says": ()})


def load_prices(name: str | Path) -> Prices:
    """Load the price table that ships under this name, or the one in a YAML file."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = TABLES / f"{name}.yaml"
        if str(name) not in shipped_tables():
            known = ", ".join(shipped_tables())
            raise WorkbenchError(
                f"prices {str(name)!r}: no such table{nearest(str(name), shipped_tables())}; "
                f"give a YAML file, or one of: {known}"
            )
    try:
        values = read_yaml_file(path)
    except UnreadableText as error:
        message = f"prices {name}: cannot be read ({error.reason}); give a YAML file with a price table"
        raise WorkbenchError(message) from None
    if not isinstance(values, dict):
        raise WorkbenchError(f"prices {name}: must be a mapping with name, source, date, input and output")
    return Prices.from_values(values, f"prices {name}")


def shipped_tables() -> list[str]:
    return sorted(path.stem for path in TABLES.glob("*.yaml"))


def format_money(money: Fraction, digits: int = 4) -> str:
    """Format an amount for display, rounded; do not compute with the result."""
    return f"{float(round(money, digits)):,.{digits}f}"


def _decimal(value: Fraction) -> Decimal:
    found = Decimal(value.numerator) / Decimal(value.denominator)
    if Fraction(found) != value:
        raise WorkbenchError(f"a price of {value} is not an exact decimal number; choose a factor with an exact price")
    return found


def cost_per_million(price_per_hour: float | Fraction, tokens_per_s: float | Fraction) -> Fraction:
    """Return the exact cost of a million tokens: price an hour / (3600 s x tokens a second) x 10^6."""
    if price_per_hour < 0 or tokens_per_s <= 0:
        raise WorkbenchError(f"{price_per_hour} an hour at {tokens_per_s} tokens/s: give 0 or more, and a rate above 0")
    return Fraction(price_per_hour) / (HOUR * Fraction(tokens_per_s)) * MILLION
