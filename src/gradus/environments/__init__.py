"""What every environment process needs and verifiers lacks."""

from gradus.environments.verifiers.deferred import defer_imports

# Before any module below imports verifiers.
defer_imports()
