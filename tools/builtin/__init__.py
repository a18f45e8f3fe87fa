"""Tools that come with Ponder, built on the public exports of `ponder` alone."""
