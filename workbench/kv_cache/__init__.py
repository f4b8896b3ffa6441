"""The KV cache: pages, their manager, prefixes, formats, stores and offloading. It may not import models, schedulers or
executors; the files on ownership of pages import no torch."""
