"""Why a process of this node is slow, when Fleet asks: counters from before, switches for some seconds, an answer."""
