"""Sign thoughts, to verify that a thought sent back by a client is unchanged.

signature = base64url(HMAC-SHA256(key, model | place | thought))
sealed    = signature . base64url(thought)         for a hidden thought
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import zlib

from workbench.errors import WorkbenchError

MAX_THOUGHT_BYTES = 4 << 20


class ThoughtSigner:
    """A signer of thoughts; a signature covers the model, and the thought's place among the blocks of an answer.

    Args:
        key: secret bytes; default: random, so that signatures end with the process.
    """

    def __init__(self, key: bytes = b""):
        self._key = key or secrets.token_bytes(32)

    def sign(self, model: str, place: int, thought: str) -> str:
        """Return the signature of a shown thought."""
        parts = (model.encode(), str(place).encode(), thought.encode("utf-8", "surrogatepass"))
        message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return _encode(hmac.new(self._key, message, hashlib.sha256).digest())

    def check(self, model: str, place: int, thought: str, signature: str) -> None:
        """Raise WorkbenchError if the thought does not match its signature."""
        expected = self.sign(model, place, thought)
        if not hmac.compare_digest(expected.encode(), signature.encode("utf-8", "surrogatepass")):
            raise WorkbenchError(
                "the signature does not match this thought, model and place; send the block back as it came, or leave "
                "it out (a server without a file of keys signs with a new key each time it starts)"
            )

    def seal(self, model: str, place: int, thought: str) -> str:
        """Return a signature that contains the thought itself, for a hidden thought."""
        packed = zlib.compress(thought.encode("utf-8", "surrogatepass"))
        return f"{self.sign(model, place, thought)}.{_encode(packed)}"

    def unseal(self, model: str, place: int, sealed: str) -> str:
        """Return the thought in a sealed signature; WorkbenchError if it was changed."""
        signature, _, packed = sealed.partition(".")
        try:
            reader = zlib.decompressobj()
            thought = reader.decompress(_decode(packed), MAX_THOUGHT_BYTES).decode("utf-8", "surrogatepass")
            if not reader.eof:
                raise ValueError("the packed text ends too early, or is too long")
        except (binascii.Error, zlib.error, ValueError):
            raise WorkbenchError("holds no thought of this server; send the block back as it came") from None
        self.check(model, place, thought, signature)
        return thought


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
