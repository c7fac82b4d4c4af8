"""What `gradus env check` asks of an environment, and how it finds out."""

from gradus.environments.verifiers.deferred import defer_imports

# Before any module below imports verifiers.
defer_imports()
