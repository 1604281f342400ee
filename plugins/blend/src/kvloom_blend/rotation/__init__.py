"""K that was computed at one position, moved to another: rotary position embeddings, turned further."""

from .gate import gate
from .models import Rotations, rotations_of
from .native import Turn
from .rotation import Rotation

__all__ = ["Rotation", "Rotations", "Turn", "gate", "rotations_of"]
