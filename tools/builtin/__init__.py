"""Tools that come with Ponder, made with what `ponder` exports to everyone."""
