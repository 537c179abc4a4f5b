"""How the demo's models in prefgrpo/tiny/assets were trained; README.md has the commands, data splits and numbers."""
