"""Programs that call the CUDA runtime themselves, for demos on a real device."""
