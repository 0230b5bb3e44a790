"""Others' routing code as it ships, behind adapters, to be measured beside ours on the same engines."""
