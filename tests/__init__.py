"""Tests of edge0; one package, so that folders may share file names."""
