"""Workers as actors of a Ray cluster: trajectories run in processes of their own, beside replicas that are actors as well.

Ray carries one call for each trajectory; its turns go from the worker to the replicas over the transport. Needs the extra `ray`.
"""

from ostinato_agent_loop.ray_workers.process import WorkerReport, WorkerSpec
from ostinato_agent_loop.ray_workers.workers import RayWorker, RayWorkers

__all__ = ["RayWorker", "RayWorkers", "WorkerReport", "WorkerSpec"]
