-- Scores are asked for single trajectories, and the table grows with the months.
DROP INDEX CONCURRENTLY IF EXISTS babylon.scores_of_trajectory;
CREATE INDEX CONCURRENTLY scores_of_trajectory ON babylon.scores (trajectory_id);
