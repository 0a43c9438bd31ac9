"""What a step trains: advantages, mini-batches, the policy, the critic, preferences."""
