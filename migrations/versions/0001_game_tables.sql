-- The game's tables as the game itself declares them: Prisma's names, timestamps without time zone
-- in UTC, JSON as text. EXTERNAL storage leaves the large texts uncompressed, because unpacking
-- them in the server is what limits collecting a window.

CREATE TABLE "User" (
    id                text PRIMARY KEY,
    username          text UNIQUE,
    "displayName"     text,
    "isAgent"         boolean NOT NULL DEFAULT false,
    "isTest"          boolean NOT NULL DEFAULT false,
    "virtualBalance"  numeric(18,2) NOT NULL DEFAULT 1000,
    "lifetimePnL"     numeric(18,2) NOT NULL DEFAULT 0,
    "agentSystem"     text
);

CREATE TABLE trajectories (
    id                      text PRIMARY KEY,
    "trajectoryId"          text NOT NULL UNIQUE,
    "agentId"               text NOT NULL REFERENCES "User" (id),
    "startTime"             timestamp(3) NOT NULL,
    "endTime"               timestamp(3) NOT NULL,
    "durationMs"            integer NOT NULL,
    "windowId"              varchar(50),
    "windowHours"           integer NOT NULL DEFAULT 1,
    "episodeId"             varchar(100),
    "scenarioId"            varchar(100),
    "batchId"               varchar(100),
    "stepsJson"             text NOT NULL,
    "rewardComponentsJson"  text NOT NULL,
    "metricsJson"           text NOT NULL,
    "metadataJson"          text NOT NULL,
    "totalReward"           double precision NOT NULL,
    "episodeLength"         integer NOT NULL,
    "finalStatus"           text NOT NULL,
    "finalBalance"          double precision,
    "finalPnL"              double precision,
    "tradesExecuted"        integer,
    "postsCreated"          integer,
    "aiJudgeReward"         double precision,
    "aiJudgeReasoning"      text,
    "judgedAt"              timestamp(3),
    "isTrainingData"        boolean NOT NULL DEFAULT true,
    "isEvaluation"          boolean NOT NULL DEFAULT false,
    "usedInTraining"        boolean NOT NULL DEFAULT false,
    "trainedInBatch"        text,
    "createdAt"             timestamp(3) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    "updatedAt"             timestamp(3) NOT NULL
);
ALTER TABLE trajectories
    ALTER "stepsJson" SET STORAGE EXTERNAL,
    ALTER "metadataJson" SET STORAGE EXTERNAL;
CREATE INDEX "trajectories_windowId_idx" ON trajectories ("windowId");
CREATE INDEX "trajectories_startTime_idx" ON trajectories ("startTime");

CREATE TABLE llm_call_logs (
    id                  text PRIMARY KEY,
    "trajectoryId"      text NOT NULL,
    "stepId"            text NOT NULL,
    "callId"            text NOT NULL UNIQUE,
    "timestamp"         timestamp(3) NOT NULL,
    "latencyMs"         integer,
    model               text NOT NULL,
    purpose             text NOT NULL,
    "actionType"        text,
    "systemPrompt"      text NOT NULL,
    "userPrompt"        text NOT NULL,
    "messagesJson"      text,
    response            text NOT NULL,
    reasoning           text,
    temperature         double precision NOT NULL,
    "maxTokens"         integer NOT NULL,
    "topP"              double precision,
    "promptTokens"      integer,
    "completionTokens"  integer,
    "totalTokens"       integer,
    metadata            text,
    "createdAt"         timestamp(3) NOT NULL DEFAULT CURRENT_TIMESTAMP
);
ALTER TABLE llm_call_logs
    ALTER "systemPrompt" SET STORAGE EXTERNAL,
    ALTER "userPrompt" SET STORAGE EXTERNAL,
    ALTER "messagesJson" SET STORAGE EXTERNAL,
    ALTER response SET STORAGE EXTERNAL,
    ALTER reasoning SET STORAGE EXTERNAL;
CREATE INDEX "llm_call_logs_trajectoryId_idx" ON llm_call_logs ("trajectoryId");

CREATE TABLE training_batches (
    id                   text PRIMARY KEY,
    "batchId"            text NOT NULL UNIQUE,
    "scenarioId"         text,
    "baseModel"          text NOT NULL,
    "modelVersion"       text NOT NULL,
    "trajectoryIds"      text NOT NULL,
    "rankingsJson"       text,
    "rewardsJson"        text NOT NULL,
    "trainingLoss"       double precision,
    "policyImprovement"  double precision,
    status               text NOT NULL DEFAULT 'pending',
    error                text,
    "createdAt"          timestamp(3) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    "startedAt"          timestamp(3),
    "completedAt"        timestamp(3)
);

CREATE TABLE market_outcomes (
    id                    text PRIMARY KEY,
    "windowId"            varchar(50) NOT NULL,
    "stockTicker"         varchar(20),
    "startPrice"          numeric(10,2),
    "endPrice"            numeric(10,2),
    "changePercent"       numeric(5,2),
    sentiment             text,
    "newsEvents"          jsonb,
    "predictionMarketId"  text,
    question              text,
    outcome               text,
    "finalProbability"    numeric(5,4),
    volume                numeric(15,2),
    "createdAt"           timestamp(3) NOT NULL DEFAULT CURRENT_TIMESTAMP
);
CREATE INDEX "market_outcomes_windowId_idx" ON market_outcomes ("windowId");

CREATE TABLE trained_models (
    id                 text PRIMARY KEY,
    "modelId"          text NOT NULL UNIQUE,
    version            text NOT NULL,
    "baseModel"        text NOT NULL,
    "trainingBatch"    text,
    status             text NOT NULL DEFAULT 'training',
    "deployedAt"       timestamp(3),
    "archivedAt"       timestamp(3),
    "storagePath"      text NOT NULL,
    "benchmarkScore"   double precision,
    accuracy           double precision,
    "avgReward"        double precision,
    "evalMetrics"      jsonb,
    "wandbRunId"       text,
    "wandbArtifactId"  text,
    "agentsUsing"      integer NOT NULL DEFAULT 0,
    "totalInferences"  integer NOT NULL DEFAULT 0,
    "createdAt"        timestamp(3) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    "updatedAt"        timestamp(3) NOT NULL
);

CREATE TABLE reward_judgments (
    id                     text PRIMARY KEY,
    "trajectoryId"         text NOT NULL UNIQUE,
    "judgeModel"           text NOT NULL,
    "judgeVersion"         text NOT NULL,
    "overallScore"         double precision NOT NULL,
    "componentScoresJson"  text,
    rank                   integer,
    "normalizedScore"      double precision,
    "groupId"              text,
    reasoning              text NOT NULL,
    "strengthsJson"        text,
    "weaknessesJson"       text,
    "criteriaJson"         text NOT NULL,
    "judgedAt"             timestamp(3) NOT NULL DEFAULT CURRENT_TIMESTAMP
);
