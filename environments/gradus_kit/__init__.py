"""The library of the task sets, also for environments that users write.

- `multiagent`: the rules of episodes with several agents, pure: whose turn it is, what is public,
  prompts, fields, scores; reading an answer, drawing the seat that learns
- `sandbox`: programs that a model wrote, boxed and bounded; calls that may hang
- `tasksets`: rows of public data, a hold-out by hash, reward functions by name
- `first_use`: what a package offers is loaded when it is asked for
"""
