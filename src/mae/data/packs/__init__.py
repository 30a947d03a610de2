"""Packs: many images in few files, written by `mae pack`."""
